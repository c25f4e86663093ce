"""What a train call asks of a model: the shape of a loss, independent of devices and micro-batches.

A loss sees one micro-batch at a time. It divides by totals over the whole mini-batch (all micro-batches
of all ranks), so that the sum of its values over micro-batches and ranks is the loss of the mini-batch,
and gradients are summed, never averaged. So nothing depends on how the batch was divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from rlayout.data.batch import Batch


@dataclass(frozen=True)
class TokenScores:
    """What the model computed for the tokens of a micro-batch, aligned with them.

    Attributes:
        logprobs: log-probability of each token given those before it [T], float32, with gradient;
            0 where the batch's ``mask`` is false (nothing is computed there).
        entropy: entropy in nats of the distribution of each token [T], float32, without gradient;
            0 where ``mask`` is false.
    """

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Totals:
    """Counts over the whole mini-batch, all ranks and micro-batches."""

    tokens: float
    """Tokens with ``mask`` true; at least 1."""
    rows: float
    """Rows; at least 1."""


@dataclass(frozen=True)
class Statistic:
    """A logged figure that can be combined over micro-batches and ranks.

    ``mean``: the figure is sum of ``value`` over sum of ``weight``. ``max``: the largest ``value``.
    """

    value: float
    weight: float = 1.0
    kind: Literal["mean", "max"] = "mean"

    def __add__(self, other: Statistic) -> Statistic:
        if self.kind != other.kind:
            raise ValueError(f"cannot combine a {self.kind} with a {other.kind}")
        if self.kind == "max":
            return Statistic(max(self.value, other.value), 1.0, "max")
        return Statistic(self.value + other.value, self.weight + other.weight)

    @property
    def figure(self) -> float:
        if self.kind == "max":
            return self.value
        return self.value / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class LossOutput:
    """This micro-batch's share of the loss (a scalar with gradient) and of the logged figures."""

    loss: Tensor
    statistics: Mapping[str, Statistic]


class Loss(Protocol):
    """A pure, picklable function (usually a frozen dataclass that holds its coefficients and inherits this)."""

    def __call__(self, scores: TokenScores, batch: Batch, totals: Totals) -> LossOutput:
        """Loss of the micro-batch ``batch``, whose ``tokens`` hold ``mask`` [T] bool and the call's inputs."""
        ...

    @property
    def teaching_keys(self) -> tuple[str, ...]:
        """What ``teaches`` reads: keys with one value per row. Empty: every row teaches."""
        return ()

    def teaches(self, rows: Batch) -> Tensor:
        """Which rows can have a gradient [B], bool. The others count in the totals and are not computed."""
        return torch.ones(len(rows), dtype=torch.bool)


class Compute(Protocol):
    """A pure, picklable function of the whole batch, run on CPU (advantages)."""

    def __call__(self, batch: Batch) -> tuple[Batch, Mapping[str, Statistic]]:
        """Return a batch of the same rows with the call's outputs, and figures to log."""
        ...
