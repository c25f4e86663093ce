"""Who computes which rows: pure functions, so that a plan decides speed and never results."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence

from rlayout.spec.model_shape import ModelShape


def row_cost(length: int, shape: ModelShape) -> float:
    """Relative cost of computing a row of ``length`` tokens once: matrix products plus causal attention.

    Per token and layer the projections take 2 x (their parameters) operations, attention over the
    ``length / 2`` tokens before it, on average, 4 x heads x head_dim x length / 2.
    """
    width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    projections = shape.hidden_size * (2 * width + 2 * kv_width + 3 * shape.intermediate_size)
    return length * (2.0 * projections + 2.0 * width * length)


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deal rows to ranks so that the largest sum of costs is small.

    Longest row first to the least loaded rank, which is within 4/3 of the best possible (Graham 1969);
    ties go to the lowest rank, so the result is deterministic. Every rank's rows are in ascending order.

    Args:
        costs: cost per row.
        num_ranks: at least 1; with fewer rows than ranks some get none.

    Returns:
        For every rank the indices of its rows.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, 0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = heapq.heappop(loads)
        ranks[rank].append(index)
        heapq.heappush(loads, (load + costs[index], count + 1, rank))
    return [sorted(rows) for rows in ranks]


def deal_groups(groups: Sequence[int], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deal rows to ranks, those of one group together while that leaves the loads even.

    Rows of one group share their prompt, which a rank that has them together computes once. With fewer
    than two groups per rank they are dealt one by one.

    Args:
        groups: group per row.
        costs: cost per row.
        num_ranks: at least 1.

    Returns:
        For every rank the indices of its rows.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    if len(members) < 2 * num_ranks:
        return deal(costs, num_ranks)
    units = list(members.values())
    dealt = deal([sum(costs[row] for row in unit) for unit in units], num_ranks)
    return [sorted(row for index in indices for row in units[index]) for indices in dealt]


def mini_batches(
    ids: Sequence[int], groups: Sequence[int], updates: int, seed: int, step: int
) -> list[list[int]]:
    """Divide the rows of a step into ``updates`` mini-batches of equal size, by id and not by place.

    Whole groups go to one mini-batch where their sizes allow it. The division depends on (seed, step, ids)
    alone. With one update the order is that of the ids.

    Returns:
        Per mini-batch the ids of its rows.

    Raises:
        ValueError: the number of rows is not a multiple of ``updates``.
    """
    if len(ids) % updates:
        raise ValueError(f"{len(ids)} rows cannot be divided into {updates} mini-batches of equal size")
    ordered = sorted(ids)
    size = len(ordered) // updates
    if updates > 1:
        group_of = dict(zip(ids, groups, strict=True))
        counts = Counter(groups)
        whole = len(set(counts.values())) == 1 and size % counts[groups[0]] == 0
        units = sorted(counts) if whole else ordered
        random.Random(f"mini-batches {seed} {step}").shuffle(units)
        place = {unit: index for index, unit in enumerate(units)}
        ordered.sort(key=lambda row: place[group_of[row] if whole else row])
    return [ordered[i * size : (i + 1) * size] for i in range(updates)]
