"""Advantages from the rewards of a prompt's answers: pure functions, on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Float64, Int
from torch import Tensor


@dataclass(frozen=True)
class GroupMoments:
    """Reward moments of each row's group.

    Attributes:
        deviation: reward minus the mean of the row's group [B], float64.
        std: standard deviation (n - 1 in the denominator) of the row's group [B], float64; 0 for a
            group of one.
    """

    deviation: Float64[Tensor, " B"]
    std: Float64[Tensor, " B"]


def group_advantages(
    rewards: Float32[Tensor, " B"], groups: Sequence[int], *, normalise_std: bool, std_floor: float
) -> Float32[Tensor, " B"]:
    """Reward minus the mean of its group, over the group's standard deviation if asked; float32 [B].

    GRPO (arXiv 2402.03300, section 4.1.2); without the division, Dr. GRPO (arXiv 2503.20783, eq. 3).
    A group of equal rewards, and so a group of one, teaches nothing and gives exactly 0.

    Args:
        rewards: finite, one per row [B].
        groups: the prompt that each row answers [B], in any order.
        normalise_std: divide by (standard deviation + ``std_floor``).
        std_floor: added to the standard deviation, in units of reward, so that nearly equal rewards are
            not blown up.
    """
    moments = group_moments(rewards, groups)
    scale = moments.std + std_floor if normalise_std else torch.ones_like(moments.std)
    # A floor of 0 over a group of equal rewards would be 0 / 0.
    scale = scale.where(scale > 0, 1.0)
    return (moments.deviation / scale).to(torch.float32)


def group_moments(rewards: Float32[Tensor, " B"], groups: Sequence[int]) -> GroupMoments:
    """Deviation from the group's mean and the group's standard deviation, for each row."""
    index = _group_index(groups)
    num_groups = len(set(groups))
    # The sum of equal float32 values is exact in float64, so equal rewards deviate by exactly 0; in float32
    # the mean of three times 0.1 is not 0.1.
    values = rewards.to(torch.float64)
    sizes = _group_sums(torch.ones_like(values), index, num_groups)
    deviation = values - (_group_sums(values, index, num_groups) / sizes)[index]
    variance = _group_sums(deviation.square(), index, num_groups) / (sizes - 1).clamp(min=1)
    return GroupMoments(deviation=deviation, std=variance.sqrt()[index])


def _group_index(groups: Sequence[int]) -> Int[Tensor, " B"]:
    """Number the groups 0, 1, ... in the order of their first row."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return torch.tensor([numbers[group] for group in groups], dtype=torch.int64)


def _group_sums(
    values: Float64[Tensor, " B"], index: Int[Tensor, " B"], num_groups: int
) -> Float64[Tensor, " G"]:
    return torch.zeros(num_groups, dtype=values.dtype).index_add_(0, index, values)
