"""From what a step left behind to logged figures."""

from __future__ import annotations

import pytest
import torch

from rlayout.data.batch import Batch
from rlayout.data.objective import Statistic
from rlayout.data.problem import Problem
from rlayout.display import step_line
from rlayout.metrics import answer_figures, figures, sample_records, spans
from rlayout.runtime.controller import StepResult
from rlayout.runtime.host import HOST
from rlayout.runtime.reallocation import Receipt
from rlayout.runtime.usage import Usage

ANSWERS = Batch(
    ids=(4, 5, 6),
    groups=(2, 2, 3),
    lengths=torch.tensor([3, 2, 4]),
    tokens={
        "tokens": torch.arange(9),
        "mask": torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool),
    },
    rows={
        "rewards": torch.tensor([1.0, 0.0, 0.5]),
        "correct": torch.tensor([True, False, False]),
        "finished": torch.tensor([True, True, False]),
        "problem": (Problem("1+1", "2"), Problem("1+1", "2"), Problem("3+3", "6")),
        "texts": ("2", "3", "??"),
        "reasons": ("equal", "other", "cut"),
    },
)


def usage(start: float, seconds: float, tokens: int, gib: int = 1) -> Usage:
    return Usage(start=start, seconds=seconds, tokens=tokens, peak_memory_bytes=gib * 2**30)


RESULT = StepResult(
    step=3,
    seconds=9.0,
    statistics={"train": {"loss": Statistic(6.0, 4.0)}},
    usages={
        # Device 1 starts a second late and ends last: the call took 4 seconds.
        "generate": {0: usage(100.0, 2.0, 30, gib=2), 1: usage(101.0, 3.0, 50)},
        "reward": {HOST: usage(104.0, 0.5, 80)},
    },
    receipts=[
        Receipt("actor", 2, device, "abc", received, received, seconds)
        for device, received, seconds in ((0, 0, 0.2), (1, 700, 0.3))
    ],
)


def test_figures_of_a_step() -> None:
    assert figures(RESULT) == pytest.approx(
        {
            "train/loss": 1.5,
            "seconds/step": 9.0,
            "seconds/generate": 4.0,
            "tokens_per_second/generate": 20.0,
            "seconds/reward": 0.5,
            "tokens_per_second/reward": 160.0,
            "peak_memory_gib/worker_0": 2.0,
            "peak_memory_gib/worker_1": 1.0,
            "peak_memory_gib/host": 1.0,
            "seconds/reallocation": 0.3,
            "reallocation/bytes": 700.0,
        }
    )


def test_figures_of_answers() -> None:
    assert answer_figures(ANSWERS) == pytest.approx(
        {
            "answers/reward": 0.5,
            "answers/accuracy": 1 / 3,
            "answers/tokens_mean": 2.0,
            "answers/tokens_max": 3.0,
            "answers/truncated": 1 / 3,
        }
    )


def test_spans_name_call_device_and_time() -> None:
    listed = spans(RESULT, "grpo")
    assert len(listed) == 3
    assert listed[1] == {
        "stage": "grpo",
        "step": 3,
        "call": "generate",
        "device": 1,
        "start": 101.0,
        "seconds": 3.0,
        "tokens": 50,
        "peak_memory_bytes": 2**30,
    }


def test_sample_records_are_for_people() -> None:
    records = sample_records(ANSWERS, "grpo", 3, 2)
    assert [r["id"] for r in records] == [4, 5]
    assert records[0] == {
        "stage": "grpo",
        "step": 3,
        "id": 4,
        "question": "1+1",
        "expected": "2",
        "text": "2",
        "reward": 1.0,
        "verdict": "equal",
        "tokens": 2,
    }
    assert len(sample_records(ANSWERS, "grpo", 3, 99)) == 3


def test_the_line_of_a_step_shows_what_there_is() -> None:
    shown = {"answers/reward": 0.25, "train/loss": -0.5, "answers/truncated": 0.5, "seconds/step": 2.0}
    assert step_line("grpo", 0, 9, shown) == "grpo 1/9  reward 0.250  cut 50%  2.0 s"
