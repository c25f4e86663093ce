"""Supervised fine-tuning: maximise the likelihood of given answers.

Logged figures:
    loss: what is minimised, the negative log-likelihood in nats, aggregated as configured.
    entropy: mean entropy of the model's distributions at the trained tokens, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlayout.algorithms.base import Algorithm
from rlayout.algorithms.losses import (
    Aggregation,
    check_aggregation,
    denominator,
    negative_log_likelihood,
    token_weights,
)
from rlayout.algorithms.statistics import gather_statistics
from rlayout.data.batch import Batch
from rlayout.data.objective import Loss, LossOutput, TokenScores, Totals
from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.sampling import Sampling


@dataclass(frozen=True)
class Sft:
    """Settings of supervised fine-tuning."""

    name: Literal["sft"] = "sft"
    updates_per_step: int = 1
    """Optimizer steps that a step's rows are divided into."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number. Default as in Hugging Face's trainer (tokens of the whole batch)."""

    def __post_init__(self) -> None:
        if self.updates_per_step < 1:
            raise ValueError(f"updates_per_step must be at least 1, got {self.updates_per_step}")
        check_aggregation(self.aggregation)

    def build(self, sampling: Sampling) -> Algorithm:
        """One train call over the dataset's ``tokens`` and ``mask``; ``sampling`` plays no part."""
        del sampling
        train = Call(
            "train", Kind.TRAIN, role="actor", inputs=("tokens", "mask"), updates=self.updates_per_step
        )
        return Algorithm(
            dataflow=Dataflow((train,), source=("tokens", "mask")),
            losses={"train": SftLoss(self.aggregation)},
            role_sources={"actor": "model"},
        )


@dataclass(frozen=True)
class SftLoss(Loss):
    """Mean negative log-likelihood of the tokens under the mask."""

    aggregation: Aggregation

    def __call__(self, scores: TokenScores, batch: Batch, totals: Totals) -> LossOutput:
        """Return the micro-batch's share of the loss; ``batch.tokens`` holds ``mask`` [T] bool."""
        mask = batch.tokens["mask"]
        logprobs = scores.logprobs.where(mask, 0.0)
        weights = token_weights(mask, batch.lengths.to(mask.device), self.aggregation, logprobs.dtype)
        total = (weights * negative_log_likelihood(logprobs)).sum()
        share = weights.new_tensor(len(batch)) if self.aggregation == "sequence_mean" else mask.sum()
        return LossOutput(
            loss=total / denominator(totals, self.aggregation),
            statistics=gather_statistics(
                means={
                    "loss": (total, share),
                    "entropy": (scores.entropy.where(mask, 0.0).sum(), mask.sum()),
                },
                maxima={},
            ),
        )
