"""The same mini-batch gives the same step, however many ranks and micro-batches it is divided into."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from rlayout.data.batch import Batch
from rlayout.errors import DataError, TrainingError
from rlayout.model.training import Trainer
from rlayout.spec.optimization import Optimization
from tests.distributed.harness import run_ranks
from tests.model.tiny import WeightedLikelihood, random_batch, tiny_model

LENGTHS = [3, 50, 7, 7, 120, 1, 33, 20, 2, 64]
SETTINGS = Optimization(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
Shares = Sequence[Sequence[int]]
ALL = range(len(LENGTHS))
SHARES: dict[str, Shares] = {
    "one rank": [ALL],
    "two ranks": [ALL[::2], ALL[1::2]],
    "two ranks, one long row apart": [[4], [i for i in ALL if i != 4]],
    "two ranks, one without rows": [[], ALL],
    "four ranks": [ALL[i::4] for i in range(4)],
    "four ranks, two without rows": [ALL[::2], [], ALL[1::2], []],
}
TOLERANCE = 1e-5


def two_steps(rows: Sequence[int], micro_batch_tokens: int, group: dist.ProcessGroup | None) -> dict:
    trainer = Trainer(tiny_model(), SETTINGS, total_steps=4, group=group)
    # A worker that was dealt nothing has no keys either.
    batch = random_batch(LENGTHS).select(rows) if rows else Batch((), (), torch.zeros(0, dtype=torch.int64))
    results = [
        trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=micro_batch_tokens, temperature=0.9)
        for _ in range(2)
    ]
    return {
        "figures": [{n: s.figure for n, s in r.statistics.items()} for r in results],
        "weights": trainer.optimizer.weights[: trainer.optimizer.table.numel],
        "num_micro_batches": [r.num_micro_batches for r in results],
    }


@pytest.mark.parametrize("micro_batch_tokens", [1000, 200, 120, 64, 55])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES.keys())
def test_division_changes_nothing(shares: Shares, micro_batch_tokens: int) -> None:
    whole = two_steps(ALL, 1000, None)

    def rank_main(rank: int) -> dict:
        return two_steps(shares[rank], micro_batch_tokens, dist.group.WORLD)

    for part in run_ranks(rank_main, len(shares)):
        for found, expected in zip(part["figures"], whole["figures"], strict=True):
            assert found.keys() == expected.keys()
            for name, figure in expected.items():
                assert found[name] == pytest.approx(figure, rel=TOLERANCE, abs=TOLERANCE), name
        torch.testing.assert_close(part["weights"], whole["weights"], rtol=TOLERANCE, atol=TOLERANCE)


def test_one_to_five_micro_batches_were_among_them() -> None:
    batches = {two_steps(ALL, n, None)["num_micro_batches"][0] for n in (1000, 200, 120, 64, 55)}
    assert batches == {1, 2, 3, 4, 5}


def test_every_rank_ends_with_the_same_bits() -> None:
    def rank_main(rank: int) -> torch.Tensor:
        return two_steps(ALL[rank::2], 64, dist.group.WORLD)["weights"]

    first, second = run_ranks(rank_main, 2)
    assert torch.equal(first, second)


def test_state_is_divided() -> None:
    def rank_main(rank: int) -> tuple[int, int]:
        optimizer = Trainer(tiny_model(), SETTINGS, total_steps=1, group=dist.group.WORLD).optimizer
        return len(optimizer.first_moment), optimizer.table.numel

    for size, total in run_ranks(rank_main, 3):
        assert size == -(-total // 3)


def test_bfloat16_is_the_same_on_all_ranks_and_near_float32() -> None:
    def weights(group: dist.ProcessGroup | None, rows: Sequence[int]) -> torch.Tensor:
        trainer = Trainer(tiny_model(dtype=torch.bfloat16), SETTINGS, total_steps=4, group=group)
        trainer.step(random_batch(LENGTHS).select(rows), WeightedLikelihood(), micro_batch_tokens=64)
        return trainer.optimizer.weights[: trainer.optimizer.table.numel].float()

    first, second = run_ranks(lambda rank: weights(dist.group.WORLD, ALL[rank::2]), 2)
    assert torch.equal(first, second)
    # One Adam step moves each weight by the learning rate, whose sign rounding can turn for a tiny gradient.
    assert ((first - weights(None, ALL)).abs() > 0.005).float().mean() < 0.05


def test_all_ranks_refuse_what_one_must_refuse() -> None:
    def rank_main(rank: int) -> str:
        batch = random_batch([4, 4])
        if rank == 1:
            batch.tokens["mask"][0] = True
        trainer = Trainer(tiny_model(), SETTINGS, total_steps=1, group=dist.group.WORLD)
        with pytest.raises(DataError) as caught:
            trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=10)
        return str(caught.value)

    other, own = run_ranks(rank_main, 2)
    assert "another rank" in other
    assert "row 0" in own


def test_all_ranks_name_the_first_parameter_that_is_not_finite() -> None:
    def rank_main(rank: int) -> str:
        weights = torch.tensor([1.0, torch.nan if rank == 1 else 1.0])
        batch = random_batch([9, 9]).with_values(rows={"weights": weights})
        trainer = Trainer(tiny_model(), SETTINGS, total_steps=1, group=dist.group.WORLD)
        before = trainer.optimizer.weights.clone()
        with pytest.raises(TrainingError) as caught:
            trainer.step(batch, WeightedLikelihood(), micro_batch_tokens=10)
        assert torch.equal(trainer.optimizer.weights, before)
        return str(caught.value)

    first, second = run_ranks(rank_main, 2)
    assert first == second
    assert "embedding.weight" in first
