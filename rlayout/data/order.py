"""Which problem stands at which position of the endless sequence of training problems.

A position is all that a run must remember to continue: each epoch is a permutation that depends on
nothing but the seed and the epoch.
"""

from __future__ import annotations

import random
from array import array
from functools import lru_cache


def problem_at(position: int, num_problems: int, seed: int) -> int:
    """Index of the problem at global ``position`` (from 0)."""
    if position < 0:
        raise ValueError(f"position {position} is negative")
    epoch, place = divmod(position, num_problems)
    return _permutation(num_problems, seed, epoch)[place]


def problems_at(positions: range, num_problems: int, seed: int) -> list[int]:
    """Indices of the problems at ``positions``; positions serve as the ids of their rows."""
    return [problem_at(position, num_problems, seed) for position in positions]


@lru_cache(maxsize=4)
def _permutation(num_problems: int, seed: int, epoch: int) -> array[int]:
    order = array("q", range(num_problems))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
