"""Configuration files: read strictly, written so that they are read back equal."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, strategies
from hypothesis import settings as hypothesis_settings

from rlayout.algorithms import Grpo, Sft
from rlayout.config import Config, load_config, save_config
from rlayout.errors import ConfigError
from rlayout.spec.serialization import to_plain
from rlayout.spec.task import ExactAnswer, Local, Procedural

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("**/*.yaml"))

SMALL: dict[str, Any] = {
    "model": {"source": "somewhere"},
    "dataset": {"name": "reasoning_gym", "task": "chain_sum"},
    "reward": {"name": "exact"},
    "algorithm": {"name": "grpo"},
    "steps": 1,
    "prompts_per_step": 2,
}


def load(folder: Path, *overrides: str, **changes: Any) -> Config:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return load_config(path, overrides)


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_read_and_written_back_equal(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    save_config(config, tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


def test_a_small_file_is_enough(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.algorithm == Grpo()
    assert config.dataset == Procedural("chain_sum")
    assert config.reward == ExactAnswer()
    assert config.warmup is None


def test_names_choose_the_kind_of_a_section(tmp_path: Path) -> None:
    config = load(tmp_path, algorithm={"name": "sft"}, dataset={"name": "file", "train": "a.jsonl"})
    assert isinstance(config.algorithm, Sft)
    assert isinstance(config.dataset, Local)


def test_overrides_win_over_the_file_and_the_last_wins(tmp_path: Path) -> None:
    config = load(tmp_path, "optimizer.learning_rate=1e-5", "steps=7", "steps=8", "warmup.steps=3")
    assert config.optimizer.learning_rate == 1e-5
    assert config.steps == 8
    assert config.warmup is not None
    assert config.warmup.steps == 3


def test_an_override_may_hold_a_list_or_another_equals_sign(tmp_path: Path) -> None:
    config = load(tmp_path, "optimizer.betas=[0.8,0.9]", "prompt.instruction=x=1")
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.prompt.instruction == "x=1"


def test_null_takes_a_section_out(tmp_path: Path) -> None:
    assert load(tmp_path, "warmup=null", warmup={"steps": 3}).warmup is None


def test_updates_must_divide_the_rows_and_the_nearest_is_named(tmp_path: Path) -> None:
    assert load(tmp_path, "algorithm.updates_per_step=4")  # 2 prompts x 8 samples
    with pytest.raises(ConfigError, match=r"16 rows per step .* 7 updates .* nearest that fits is 8"):
        load(tmp_path, "algorithm.updates_per_step=7")
    with pytest.raises(ConfigError, match=r"2 rows per step .* 4 updates .* nearest that fits is 2"):
        load(tmp_path, "algorithm.updates_per_step=4", algorithm={"name": "sft"})


@pytest.mark.parametrize(
    "override",
    [
        "steps=0",
        "prompts_per_step=0",
        "warmup.steps=0",
        "evaluation.problems=-1",
        "checkpoints.keep=0",
        "checkpoints.every_steps=-1",
        "cluster.workers=0",
        "cluster.call_timeout_seconds=0",
        "cluster.device=tpu",
        "model.dtype=float16",
        "seed=1.5",
        "steps=true",
        "sampling.top_p=0",
        "optimizer.learning_rate=nan",
    ],
)
def test_values_that_cannot_be_meant_are_refused_by_name(tmp_path: Path, override: str) -> None:
    section, _, field = override.partition("=")[0].rpartition(".")
    with pytest.raises(ConfigError, match=f"{section}.*{field}"):
        load(tmp_path, override)


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for name in SMALL:
        if name != "reward":
            path.write_text(yaml.safe_dump({k: v for k, v in SMALL.items() if k != name}))
            with pytest.raises(ConfigError, match=f"^{name}: missing"):
                load_config(path)


@given(
    seed=strategies.integers(0, 2**40),
    rate=strategies.floats(1e-12, 10),
    text=strategies.text(strategies.characters(codec="utf-8", exclude_categories=["C"])),
)
@hypothesis_settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_saved_is_read_back_equal(tmp_path: Path, seed: int, rate: float, text: str) -> None:
    plain = load(tmp_path)
    config = replace(
        plain,
        seed=seed,
        optimizer=replace(plain.optimizer, learning_rate=rate),
        prompt=replace(plain.prompt, system=text),
    )
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_every_setting_is_written(tmp_path: Path) -> None:
    save_config(load(tmp_path), tmp_path / "saved.yaml")
    assert set(yaml.safe_load((tmp_path / "saved.yaml").read_text())) == {f.name for f in fields(Config)}


def test_a_saved_file_names_its_paths_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "judge.py"):
        (tmp_path / name).touch()
    config = load(
        tmp_path,
        dataset={"name": "file", "train": "train.jsonl", "test": "missing.jsonl"},
        reward={"name": "function", "function": "judge.py:reward"},
    )
    save_config(config, tmp_path / "saved.yaml")
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())
    assert saved["dataset"]["train"] == str(tmp_path / "train.jsonl")
    assert saved["dataset"]["test"] == "missing.jsonl"
    assert saved["reward"]["function"] == f"{tmp_path / 'judge.py'}:reward"
    assert saved["model"] == to_plain(config)["model"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.max_grad_norm=nan", r"optimizer\.max_grad_norm: expected a finite number, got 'nan'"),
        ("sampling.temperature=.inf", r"sampling\.temperature: expected a finite number"),
        ("sampling.temperature=1e-45", r"sampling: temperature must be 0 \(greedy\) or at least"),
        ("cluster.call_timeout_seconds=.inf", r"cluster\.call_timeout_seconds: expected a finite number"),
        ("optimizer.learning_rate=" + "9" * 400, r"optimizer\.learning_rate: expected a finite number"),
        ("algorithm.name=[1]", r"algorithm\.name: \[1\] is not known"),
        ("algorithm=grpo", r"algorithm: expected a mapping such as \{name: grpo\}, got 'grpo'"),
        ("sampling=[]", "an override gives a list where settings are"),
        ("algorithm=[1]", "an override gives a list where settings are"),
    ],
)
def test_a_value_that_is_none_is_refused(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    save_config(load(tmp_path), path)
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


@pytest.mark.parametrize("text", ["costs ${usd}", "\\${x}", "{a}"])
def test_text_is_never_interpolated(tmp_path: Path, text: str) -> None:
    config = load(tmp_path)
    config = replace(config, prompt=replace(config.prompt, instruction=text))
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
