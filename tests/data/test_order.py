"""The order of training problems."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.data.order import problem_at, problems_at

PINNED = [1, 2, 5, 7, 6, 0, 3, 4, 4, 0, 7, 1]
SEEDS = st.integers(0, 2**32)


@given(num_problems=st.integers(1, 50), epoch=st.integers(0, 5), seed=SEEDS)
def test_each_epoch_visits_every_problem_once(num_problems, epoch, seed):
    positions = range(epoch * num_problems, (epoch + 1) * num_problems)
    assert sorted(problems_at(positions, num_problems, seed)) == list(range(num_problems))


@given(start=st.integers(0, 100), count=st.integers(0, 60), seed=SEEDS)
def test_a_position_alone_says_where_to_continue(start, count, seed):
    whole = problems_at(range(start + count), 17, seed)
    assert problems_at(range(start, start + count), 17, seed) == whole[start:]


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = problems_at(range(100), 100, 0), problems_at(range(100, 200), 100, 0)
    assert len({tuple(first), tuple(second), tuple(problems_at(range(100), 100, 1)), tuple(range(100))}) == 4


def test_the_order_is_the_same_in_every_version():
    # A resumed run must continue in the order in which it began.
    assert problems_at(range(12), 8, 42) == PINNED
    assert problem_at(9, 8, 42) == PINNED[9]


def test_positions_count_from_zero():
    with pytest.raises(ValueError, match="position"):
        problem_at(-1, 8, 0)
