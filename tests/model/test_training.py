"""A training step of one rank. Across ranks: tests/distributed/test_training.py."""

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch

from rlayout.data.batch import Batch
from rlayout.data.objective import Loss, LossOutput, TokenScores, Totals
from rlayout.errors import DataError, TrainingError
from rlayout.model.training import Trainer
from rlayout.spec.optimization import Optimization
from tests.model.test_scoring import plain_scores
from tests.model.tiny import WeightedLikelihood, random_batch, tiny_model

LENGTHS = [3, 50, 7, 7, 120, 1, 33, 20]
SETTINGS = Optimization(learning_rate=1e-2, weight_decay=0.1)


def test_step_equals_plain_autograd_and_adamw() -> None:
    batch = random_batch(LENGTHS)
    ours, theirs = tiny_model(), tiny_model()
    trainer = Trainer(ours, SETTINGS, total_steps=1, group=None)
    result = trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=64, temperature=0.9)

    scores = TokenScores(*plain_scores(theirs, batch, 0.9))
    totals = Totals(float(batch.tokens["mask"].sum()), len(batch))
    expected = WeightedLikelihood()(scores, batch, totals)
    expected.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), SETTINGS.max_grad_norm)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
    ).step()

    figures = {name: s.figure for name, s in result.statistics.items()}
    assert figures["loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert figures["learning_rate"] == 1e-2
    for name, statistic in expected.statistics.items():
        if name != "loss":
            assert figures[name] == pytest.approx(statistic.figure, rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Spy(WeightedLikelihood):
    """Notes how many tokens each micro-batch has."""

    seen: list[int] = field(default_factory=list)
    skips: bool = True

    def teaches(self, rows: Batch) -> torch.Tensor:
        return super().teaches(rows) if self.skips else Loss.teaches(self, rows)

    def __call__(self, scores: TokenScores, batch: Batch, totals: Totals) -> LossOutput:
        self.seen.append(batch.num_tokens)
        return super().__call__(scores, batch, totals)


def test_rows_that_teach_nothing_are_counted_and_not_computed() -> None:
    batch = random_batch(LENGTHS).with_values(rows={"weights": torch.tensor([1.0, 0, -2, 0, 0, 1, 0, 3])})
    losses, models = [Spy(skips=True), Spy(skips=False)], [tiny_model(), tiny_model()]
    norms = []
    for loss, model in zip(losses, models, strict=True):
        trainer = Trainer(model, SETTINGS, total_steps=1, group=None)
        norms.append(trainer.step(batch, loss, micro_batch_tokens=60).statistics["grad_norm"].figure)
    assert sum(losses[0].seen) == 3 + 7 + 1 + 20
    assert sum(losses[1].seen) == sum(LENGTHS)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_step_in_which_nothing_teaches_leaves_a_gradient_of_zero() -> None:
    batch = random_batch(LENGTHS).with_values(rows={"weights": torch.zeros(8)})
    result = Trainer(tiny_model(), SETTINGS, total_steps=1, group=None).step(
        batch, Spy(), micro_batch_tokens=60
    )
    assert result.statistics["grad_norm"].figure == result.statistics["loss"].figure == 0.0


def test_bound_of_micro_batches_is_kept() -> None:
    spy = Spy()
    seen = spy.seen
    trainer = Trainer(tiny_model(), SETTINGS, total_steps=1, group=None)
    result = trainer.step(random_batch(LENGTHS), spy, micro_batch_tokens=60)
    assert result.num_micro_batches == len(seen) > 2
    assert sum(seen) == sum(LENGTHS)
    assert all(n <= 60 or n == 120 for n in seen)


def test_gradients_do_not_stay_between_steps() -> None:
    model = tiny_model()
    trainer = Trainer(model, SETTINGS, total_steps=2, group=None)
    batch = random_batch(LENGTHS)
    trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=60)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learns_to_repeat(dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    trainer = Trainer(model, Optimization(learning_rate=3e-3), total_steps=60, group=None)
    batch = random_batch([20] * 4)
    batch = batch.with_values(rows={"weights": -torch.ones(4)})
    losses = [
        trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=40).statistics["loss"].figure
        for _ in range(60)
    ]
    assert losses[-1] < 0.5 * losses[0]


def test_refuses_a_mini_batch_without_a_token() -> None:
    trainer = Trainer(tiny_model(), SETTINGS, total_steps=1, group=None)
    batch = random_batch([4, 4]).with_values(tokens={"mask": torch.zeros(8, dtype=torch.bool)})
    with pytest.raises(DataError, match="nothing to learn from"):
        trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=10)


def test_not_finite_loss_leaves_the_weights() -> None:
    model = tiny_model()
    trainer = Trainer(model, SETTINGS, total_steps=1, group=None)
    before = trainer.optimizer.weights.clone()
    batch = random_batch([4, 4]).with_values(rows={"weights": torch.tensor([1.0, torch.nan])})
    with pytest.raises(TrainingError, match=r"embedding\.weight"):
        trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=10)
    assert torch.equal(trainer.optimizer.weights, before)


def test_a_trainer_that_is_dropped_frees_its_memory_at_once() -> None:
    trainer = Trainer(tiny_model(), SETTINGS, total_steps=1, group=None)
    trainer.step(random_batch(LENGTHS), WeightedLikelihood(), micro_batch_tokens=60)
    kept = [weakref.ref(p) for p in (trainer, trainer.model, trainer.model.head_weight)]
    gc.disable()  # circles of references would wait for it
    try:
        del trainer
        assert [reference() for reference in kept] == [None] * 3
    finally:
        gc.enable()
