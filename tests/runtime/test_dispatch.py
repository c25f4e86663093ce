"""Dealing rows to ranks and dividing them into mini-batches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.runtime.dispatch import deal, deal_groups, mini_batches, row_cost
from rlayout.spec.model_shape import ModelShape

COSTS = st.lists(st.floats(0.1, 100), max_size=40)


@given(COSTS, st.integers(1, 9))
def test_every_row_is_dealt_once(costs: list[float], ranks: int) -> None:
    dealt = deal(costs, ranks)
    assert len(dealt) == ranks
    assert sorted(itertools.chain(*dealt)) == list(range(len(costs)))
    assert dealt == deal(costs, ranks)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=7), st.integers(1, 4))
def test_the_largest_load_is_within_four_thirds_of_the_best(costs: list[float], ranks: int) -> None:
    largest = max(sum(costs[i] for i in rows) for rows in deal(costs, ranks))
    best = min(
        max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )
    assert largest <= best * 4 / 3 + 1e-9


def test_equal_rows_are_dealt_evenly() -> None:
    assert [len(rows) for rows in deal([5.0] * 64, 3)] == [22, 21, 21]


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=24), st.integers(0, 5), st.integers(0, 5))
def test_mini_batches_do_not_depend_on_the_order_of_rows(ids: set[int], seed: int, step: int) -> None:
    rows = sorted(ids)
    groups = [i // 3 for i in rows]
    for updates in (n for n in range(1, len(rows) + 1) if len(rows) % n == 0):
        parts = mini_batches(rows, groups, updates, seed, step)
        assert parts == mini_batches(rows[::-1], groups[::-1], updates, seed, step)
        assert {len(p) for p in parts} == {len(rows) // updates}
        assert sorted(itertools.chain(*parts)) == rows


def test_mini_batches_differ_between_steps() -> None:
    ids = list(range(64))
    assert mini_batches(ids, ids, 4, 0, 0) != mini_batches(ids, ids, 4, 0, 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_groups_stay_whole_where_they_fit(per_batch: int, size: int, updates: int, seed: int) -> None:
    ids = list(range(per_batch * size * updates))
    groups = [i // size for i in ids]
    for part in mini_batches(ids, groups, updates, seed, 0):
        assert len({groups[i] for i in part}) == per_batch


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.1, 9)), max_size=40), st.integers(1, 4))
def test_groups_are_dealt_together_if_there_are_enough(rows: list[tuple[int, float]], ranks: int) -> None:
    groups, costs = [g for g, _ in rows], [c for _, c in rows]
    dealt = deal_groups(groups, costs, ranks)
    assert sorted(itertools.chain(*dealt)) == list(range(len(rows)))
    if len(set(groups)) >= 2 * ranks:
        owners = [{groups[i] for i in part} for part in dealt]
        assert sum(map(len, owners)) == len(set(groups))
    else:
        assert dealt == deal(costs, ranks)


def test_rows_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="10 rows cannot be divided into 3"):
        mini_batches(range(10), range(10), 3, 0, 0)


def test_cost_counts_matrix_products_and_attention_by_hand() -> None:
    shape = ModelShape(
        "llama", vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=2, max_positions=64,
    )  # fmt: skip
    # q and o: 4x4 each, k and v: 4x2 each, gate, up, down: 4x6 each -> 32 + 16 + 72 = 120 parameters.
    assert row_cost(10, shape) == 10 * (2 * 120 + 2 * 4 * 10)
