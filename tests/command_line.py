"""The command line as a user starts it: a process of its own, over a model small enough to train in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

PLAN: dict[str, Any] = {
    "calls": {
        "generate": {"devices": [0, 1], "layout": "d2", "micro_batch_tokens": 512},
        "ref_infer": {"devices": [1], "layout": "d1", "micro_batch_tokens": 512},
        "train": {"devices": [0], "layout": "d1", "micro_batch_tokens": 512},
    }
}
"""Generates on two devices and trains on one, so that weights must move."""

REWARD = '''
def pays(problem, text):
    """Something to learn for an untrained model, and 1 for digits alone."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def constant(problem, text):
    return 0.5


def broken(problem, text):
    raise KeyError("no such thing")
'''


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration over ``folder/model``: GRPO on sums of two digits, one worker."""
    return {
        "model": {"source": str(folder / "model"), "dtype": "float32"},
        "dataset": {
            "name": "reasoning_gym",
            "task": "chain_sum",
            "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "train_size": 500,
            "test_size": 8,
        },
        "prompt": {"template": "plain", "format": "{question}"},
        "reward": {"name": "function", "function": f"{folder / 'reward.py'}:pays"},
        "algorithm": {"name": "grpo", "samples_per_prompt": 4},
        "steps": 2,
        "prompts_per_step": 4,
        "sampling": {"max_new_tokens": 12},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"problems": 8},
        "cluster": {"workers": 1},
        "output": str(folder / "runs"),
        **changes,
    }


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """Write a configuration or a plan."""
    path.write_text(yaml.safe_dump(dict(data)))
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def command(*arguments: object) -> Sequence[str]:
    """``rlayout`` of the environment that runs the tests."""
    return [str(Path(sys.executable).with_name("rlayout")), *map(str, arguments)]


def rlayout(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run ``rlayout`` to its end."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), timeout=timeout, check=False
    )


def only_run(folder: Path) -> Path:
    """The folder of the only run in ``folder``."""
    (run,) = folder.iterdir()
    return run
