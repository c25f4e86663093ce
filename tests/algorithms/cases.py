"""Batches for the tests of losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlayout.data.batch import Batch
from rlayout.data.objective import Loss, Statistic, TokenScores, Totals

SCORES = ("logprobs", "entropy")
"""Token keys of a test batch that a loss gets as scores, not in its batch."""


def random_batch(
    lengths: Sequence[int], *, seed: int = 0, share_masked: float = 0.7, dtype: torch.dtype = torch.float64
) -> Batch:
    """Rows with everything that a loss reads; log-probabilities differ enough for both clip bounds to bind."""
    generator = torch.Generator().manual_seed(seed)
    total, rows = sum(lengths), len(lengths)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=dtype)

    logprobs = -normal(total).abs() - 0.05
    return Batch(
        ids=tuple(range(rows)),
        groups=tuple(i // 2 for i in range(rows)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens={
            "mask": torch.rand(total, generator=generator) < share_masked,
            "logprobs": logprobs,
            "entropy": normal(total).abs(),
            "sampled_logprobs": logprobs + 0.3 * normal(total),
            "ref_logprobs": logprobs + 0.3 * normal(total),
        },
        rows={"advantages": normal(rows)},
    )


def totals_of(batch: Batch) -> Totals:
    return Totals(tokens=max(1.0, float(batch.tokens["mask"].sum())), rows=max(1.0, float(len(batch))))


def evaluate(
    loss: Loss, micro_batches: Sequence[Batch], totals: Totals
) -> tuple[float, dict[tuple[int, int], float], dict[str, Statistic]]:
    """Loss, gradient and statistics summed over micro-batches, as a trainer does.

    The gradient is that of the loss by the log-probability, by (row id, position in the row).
    """
    value, gradient, statistics = 0.0, {}, {}
    for batch in micro_batches:
        logprobs = batch.tokens["logprobs"].clone().requires_grad_()
        scores = TokenScores(logprobs, batch.tokens["entropy"])
        seen = batch.only([key for key in batch.keys if key not in SCORES])
        output = loss(scores, seen, totals)
        output.loss.backward()
        value += output.loss.item()
        assert logprobs.grad is not None
        per_row = logprobs.grad.split(batch.lengths.tolist())
        for row, grad in zip(batch.ids, per_row, strict=True):
            gradient.update({(row, place): g for place, g in enumerate(grad.tolist())})
        statistics = combine(statistics, output.statistics)
    return value, gradient, statistics


def combine(left: Mapping[str, Statistic], right: Mapping[str, Statistic]) -> dict[str, Statistic]:
    assert not left or set(left) == set(right)
    return {name: left[name] + figure if left else figure for name, figure in right.items()}
