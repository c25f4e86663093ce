"""A two-layer model and random rows for it, shared by the tests of the training engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlayout.data.batch import Batch
from rlayout.data.objective import Loss, LossOutput, Statistic, TokenScores, Totals
from rlayout.model.transformer import Transformer
from rlayout.spec.model_shape import ModelShape

SHAPE = ModelShape(
    family="llama",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=512,
)


def tiny_model(*, dtype: torch.dtype = torch.float32, seed: int = 0, shape: ModelShape = SHAPE) -> Transformer:
    """A model with weights large enough that logits differ clearly."""
    model = Transformer(shape, dtype=dtype)
    model.init_weights(seed, std=0.3)
    return model


def random_batch(lengths: Sequence[int], *, seed: int = 1, vocab_size: int = SHAPE.vocab_size) -> Batch:
    """Rows of random tokens; a random part of them, never the first of a row, is under the mask."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.7
    batch = Batch(
        ids=tuple(range(len(lengths))),
        groups=tuple(range(len(lengths))),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        tokens={"tokens": torch.randint(vocab_size, (total,), generator=generator), "mask": mask},
        rows={"weights": torch.randn(len(lengths), generator=generator)},
    )
    mask[batch.offsets[:-1]] = False
    return batch


@dataclass(frozen=True)
class WeightedLikelihood(Loss):
    """Sum of each row's weight times its log-likelihood, over the tokens of the mini-batch."""

    @property
    def teaching_keys(self) -> tuple[str, ...]:
        return ("weights",)

    def teaches(self, rows: Batch) -> torch.Tensor:
        return rows.numbers("weights") != 0

    def __call__(self, scores: TokenScores, batch: Batch, totals: Totals) -> LossOutput:
        weights = torch.as_tensor(batch.rows["weights"]).repeat_interleave(batch.lengths).to(scores.logprobs)
        mask = batch.tokens["mask"]
        summed = (weights * scores.logprobs).sum()
        figures: Mapping[str, Statistic] = {
            "entropy": Statistic(float(scores.entropy.detach().sum()), float(mask.sum())),
            "longest": Statistic(float(batch.lengths.max()), kind="max"),
            "loss_per_row": Statistic(float(summed.detach()), len(batch)),
        }
        return LossOutput(summed / totals.tokens + 0.1 * summed / totals.rows, figures)
