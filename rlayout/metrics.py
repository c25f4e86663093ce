"""From what a step left behind to the figures that are logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from rlayout.data.batch import Batch
from rlayout.runtime.controller import StepResult
from rlayout.runtime.host import HOST


def figures(result: StepResult) -> dict[str, float]:
    """Statistics of every call, seconds and tokens per second of every call, peak memory per process.

    Names are ``call/figure``, ``seconds/call``, ``tokens_per_second/call``, ``peak_memory_gib/process``.
    """
    flat = {
        f"{call}/{name}": statistic.figure
        for call, statistics in result.statistics.items()
        for name, statistic in statistics.items()
    }
    flat["seconds/step"] = result.seconds
    for call, usages in result.usages.items():
        # A call lasts from its first device's start to its last device's end.
        start = min(u.start for u in usages.values())
        seconds = max(u.start + u.seconds for u in usages.values()) - start
        flat[f"seconds/{call}"] = seconds
        flat[f"tokens_per_second/{call}"] = sum(u.tokens for u in usages.values()) / max(seconds, 1e-9)
        for device, usage in usages.items():
            process = "host" if device == HOST else f"worker_{device}"
            flat[f"peak_memory_gib/{process}"] = usage.peak_memory_bytes / 2**30
    if result.receipts:
        flat["seconds/reallocation"] = max(r.seconds for r in result.receipts)
        flat["reallocation/bytes"] = float(sum(r.bytes_received for r in result.receipts))
    return flat


def answer_figures(answers: Batch) -> dict[str, float]:
    """Figures of judged answers: ``answers`` has ``mask``, ``rewards``, ``correct`` and ``finished``."""
    lengths = answer_lengths(answers)
    finished = answers.numbers("finished").float()
    return {
        "answers/reward": float(answers.numbers("rewards").mean()),
        "answers/accuracy": float(answers.numbers("correct").float().mean()),
        "answers/tokens_mean": float(lengths.mean()),
        "answers/tokens_max": float(lengths.max()),
        "answers/truncated": float(1 - finished.mean()),
    }


def answer_lengths(answers: Batch) -> torch.Tensor:
    """Sampled tokens per row [B], float32."""
    return torch.tensor([float(mask.sum()) for mask in answers.per_row("mask")])


def spans(result: StepResult, stage: str) -> list[dict[str, Any]]:
    """What each device did in the step, and when."""
    return [
        {"stage": stage, "step": result.step, "call": call, "device": device, **asdict(usage)}
        for call, usages in result.usages.items()
        for device, usage in usages.items()
    ]


def sample_records(answers: Batch, stage: str, step: int, count: int) -> list[Mapping[str, Any]]:
    """The first ``count`` judged answers for people to read."""
    chosen = range(min(count, len(answers)))
    lengths, problems = answer_lengths(answers), answers.objects("problem")
    return [
        {
            "stage": stage,
            "step": step,
            "id": answers.ids[i],
            "question": problems[i].question,
            "expected": problems[i].answer,
            "text": answers.objects("texts")[i],
            "reward": float(answers.numbers("rewards")[i]),
            "verdict": answers.objects("reasons")[i],
            "tokens": int(lengths[i]),
        }
        for i in chosen
    ]
