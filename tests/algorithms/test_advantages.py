import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlayout.algorithms.advantages import group_advantages, group_moments

REWARD = st.floats(-100, 100, width=32)


def test_by_hand():
    # groups 7: rewards 1, 3, 5 (mean 3, std 2); 2: rewards 0, 1 (mean 0.5, std 0.7071)
    rewards = torch.tensor([1.0, 0.0, 3.0, 1.0, 5.0])
    groups = (7, 2, 7, 2, 7)
    plain = group_advantages(rewards, groups, normalise_std=False, std_floor=0.0)
    scaled = group_advantages(rewards, groups, normalise_std=True, std_floor=0.0)
    assert plain.dtype == torch.float32
    assert plain.tolist() == [-2.0, -0.5, 0.0, 0.5, 2.0]
    torch.testing.assert_close(scaled, torch.tensor([-1.0, -(0.5**0.5), 0.0, 0.5**0.5, 1.0]))


def test_floor_is_added_to_the_deviation():
    found = group_advantages(torch.tensor([0.0, 2.0]), (0, 0), normalise_std=True, std_floor=1.0)
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0]) / (2**0.5 + 1))


@given(REWARD, st.integers(1, 7), st.booleans(), st.sampled_from([0.0, 1e-4]))
def test_equal_rewards_teach_exactly_nothing(reward: float, size: int, normalise: bool, floor: float):
    rewards = torch.tensor([reward, *[0.0, 1.0], *[reward] * (size - 1)])
    groups = (5, 6, 6, *[5] * (size - 1))
    found = group_advantages(rewards, groups, normalise_std=normalise, std_floor=floor)
    assert [a for a, g in zip(found.tolist(), groups, strict=True) if g == 5] == [0.0] * size
    assert found.isfinite().all()


def test_no_rows():
    found = group_advantages(torch.zeros(0), (), normalise_std=True, std_floor=1e-4)
    assert found.shape == (0,)


@given(st.lists(st.tuples(st.integers(0, 3), REWARD), min_size=1, max_size=20))
def test_moments_are_those_of_the_standard_library(rows: list[tuple[int, float]]):
    groups = tuple(group for group, _ in rows)
    found = group_moments(torch.tensor([reward for _, reward in rows]), groups)
    for place, (group, reward) in enumerate(rows):
        members = [r for g, r in rows if g == group]
        std = statistics.stdev(members) if len(members) > 1 else 0.0
        # rewards up to 100 in float64: 1e-9 is 1e5 roundings
        assert found.deviation[place].item() == pytest.approx(reward - statistics.fmean(members), abs=1e-9)
        assert found.std[place].item() == pytest.approx(std, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), REWARD), min_size=1, max_size=20), st.randoms())
def test_order_of_rows_does_not_matter(rows: list[tuple[int, float]], random):
    order = list(range(len(rows)))
    random.shuffle(order)

    def advantages(some: list[tuple[int, float]]) -> torch.Tensor:
        rewards = torch.tensor([reward for _, reward in some])
        return group_advantages(rewards, [group for group, _ in some], normalise_std=True, std_floor=1e-4)

    torch.testing.assert_close(advantages([rows[i] for i in order]), advantages(rows)[order])
