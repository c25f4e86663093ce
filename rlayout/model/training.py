"""One optimizer step of one rank: micro-batches, gradients summed in float32, a sharded update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlayout.data.batch import Batch
from rlayout.data.objective import Loss, Statistic, Totals
from rlayout.errors import DataError
from rlayout.model.gradients import GradientSum
from rlayout.model.optimizer import ShardedAdamW
from rlayout.model.scoring import check_mask, divide, score
from rlayout.model.transformer import Transformer
from rlayout.spec.optimization import Optimization


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        statistics: the loss's figures combined over micro-batches and ranks (the same on every rank), and
            ``loss``, ``grad_norm`` (before clipping) and ``learning_rate``.
        num_micro_batches: of this rank.
    """

    statistics: Mapping[str, Statistic]
    num_micro_batches: int


class Trainer:
    """Trains ``model``; its parameters become views of one flat buffer (see optimizer.py).

    Args:
        model: in bfloat16 (with float32 master weights beside it) or float32 (its own masters).
        optimization: how weights are updated.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        group: the data-parallel ranks, which all hold the same weights; None for one process.
    """

    def __init__(
        self,
        model: Transformer,
        optimization: Optimization,
        *,
        total_steps: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.model = model
        self.group = group
        self.optimizer = ShardedAdamW(model, optimization, total_steps=total_steps, group=group)
        self._gradients = GradientSum(model, self.optimizer.table)

    def step(
        self, batch: Batch, loss: Loss, *, micro_batch_tokens: int, temperature: float = 1.0
    ) -> StepResult:
        """Update the weights once. All ranks of the group call this together.

        Args:
            batch: this rank's rows of the mini-batch, possibly none, with ``tokens``, ``mask`` and what
                ``loss`` reads.
            loss: its sum over micro-batches and ranks is minimised.
            micro_batch_tokens: bound of the tokens computed at once.
            temperature: the log-probabilities are of softmax(logits / temperature).

        Raises:
            DataError: a rank's rows are refused, or no rank has a token under the mask; on all ranks.
            TrainingError: the gradient is not finite; on all ranks. The weights are untouched.
        """
        totals = self._totals(batch)
        if len(batch):  # a rank that was dealt no row has none of the keys either
            batch = batch.select(loss.teaches(batch).nonzero().flatten().tolist())
        parts = divide(batch, micro_batch_tokens)
        statistics = {"loss": Statistic(0.0, 0.0)}  # of a rank without rows to compute
        # Not kept between steps, though fresh pages cost time: idle while the role generates, it would be
        # four bytes per parameter of the peak.
        with self._gradients.collect(self.model, self.optimizer.new_gradient()) as gradient:
            for part in parts:
                micro_batch = batch.select(part)
                scores = score(self.model, micro_batch, temperature=temperature, need_gradient=True)
                output = loss(scores, micro_batch, totals)
                if output.loss.requires_grad:  # not when no token of these rows is under the mask
                    output.loss.backward()
                share = {**output.statistics, "loss": Statistic(float(output.loss.detach()), 0.0)}
                statistics = combine([statistics, share])
        update = self.optimizer.step(gradient)
        statistics = combine(self._gather(statistics))
        figures = {
            "loss": statistics["loss"].value,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
        }
        return StepResult({**statistics, **{k: Statistic(v) for k, v in figures.items()}}, len(parts))

    def _totals(self, batch: Batch) -> Totals:
        """Count tokens and rows over all ranks, and refuse on all of them what one must refuse."""
        problem: DataError | None = None
        counts = [0.0, 0.0, 0.0]
        try:
            if len(batch):
                check_mask(batch)
                counts = [float(batch.tokens["mask"].sum()), float(len(batch)), 0.0]
        except DataError as error:
            problem, counts = error, [0.0, 0.0, 1.0]
        tokens, rows, refused = self._sum(counts)
        if problem:
            raise problem
        if refused:
            raise DataError("another rank refused its rows of this step; its own error says why")
        if not tokens:
            raise DataError("nothing to learn from: no token of the mini-batch is under its mask")
        return Totals(tokens=tokens, rows=rows)

    def _sum(self, values: list[float]) -> list[float]:
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self.group:
            dist.all_reduce(summed, group=self.group)
        return summed.tolist()

    def _gather(self, statistics: dict[str, Statistic]) -> list[dict[str, Statistic]]:
        if not self.group:
            return [statistics]
        found: list[dict[str, Statistic]] = [{}] * dist.get_world_size(self.group)
        dist.all_gather_object(found, statistics, group=self.group)
        return found

    @property
    def _device(self) -> torch.device:
        return self.model.head_weight.device


def combine(shares: list[dict[str, Statistic]]) -> dict[str, Statistic]:
    """Add up statistics of the same name."""
    total: dict[str, Statistic] = {}
    for share in shares:
        for name, statistic in share.items():
            total[name] = total[name] + statistic if name in total else statistic
    return total
