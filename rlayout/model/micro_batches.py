"""How the rows of a call are divided into micro-batches: a pure function of their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# Attention makes a token dearer the longer its row is. In a row of this many tokens attention costs about
# as much as the matrix products (135M parameters on CPU; larger models later). It only steers the balance.
ATTENTION_PARITY_TOKENS = 8192


def split(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    groups: Sequence[int] | None = None,
    shared: Sequence[int] | None = None,
) -> list[list[int]]:
    """Divide rows into micro-batches of at most ``max_tokens`` tokens; a longer row is one of its own.

    Rows that share tokens stay together as far as the bound allows. Otherwise there are as few micro-batches
    as first-fit decreasing finds; where as few runs of the rows sorted by length do as well, rows of similar
    length meet (attention computes equal lengths together) and the dearest run is as cheap as it can be.
    Within a micro-batch rows that share are neighbours, and the rest sorted by length.

    Args:
        lengths: tokens of each row, at least 1.
        max_tokens: bound of the tokens that a micro-batch computes.
        groups: the group of each row; None if no rows share.
        shared: tokens of each row that rows of its group compute once in a micro-batch; the same in the
            whole group.

    Returns:
        Indices into ``lengths``, each exactly once.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if lengths and min(lengths) < 1:
        raise ValueError(f"a row must have at least 1 token, got {min(lengths)}")
    if groups is None or shared is None:
        groups, shared = range(len(lengths)), [0] * len(lengths)
    rows = _Rows(lengths, groups, shared)
    runs = _balanced_runs(rows, max_tokens)
    if any(shared):
        return runs
    packed = _first_fit_decreasing(rows, max_tokens)
    return runs if len(runs) <= len(packed) else packed


def cost(length: int) -> float:
    """Relative cost of a row, in tokens of a very short one."""
    return length * (1 + length / ATTENTION_PARITY_TOKENS)


@dataclass(frozen=True)
class _Rows:
    lengths: Sequence[int]
    groups: Sequence[int]
    shared: Sequence[int]

    @cached_property
    def order(self) -> list[int]:
        """Groups that share by their longest row, and within them, like all other rows, by length."""
        longest: dict[int, int] = {}
        for row, group in enumerate(self.groups):
            longest[group] = max(longest.get(group, 0), self.lengths[row])

        def place(row: int) -> tuple[int, int, int, int]:
            length, group = self.lengths[row], self.groups[row]
            return (longest[group], group, length, row) if self.shared[row] else (length, -1, length, row)

        return sorted(range(len(self.lengths)), key=place)


def _first_fit_decreasing(rows: _Rows, max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in reversed(rows.order):
        length = rows.lengths[row]
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([row])
            room.append(max_tokens - length)
        else:
            bins[place].append(row)
            room[place] -= length
    return [members[::-1] for members in bins]


def _balanced_runs(rows: _Rows, max_tokens: int) -> list[list[int]]:
    """Fewest runs of the rows in order; of those divisions, the one whose dearest run is cheapest."""
    runs = _runs(rows, max_tokens, float("inf"))
    low, high = 0.0, sum(cost(length) for length in rows.lengths)
    # The bound only steers the balance: half a percent of the whole is near enough.
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        tried = _runs(rows, max_tokens, middle)
        if len(tried) <= len(runs):
            runs, high = tried, middle
        else:
            low = middle
    return runs


def _runs(rows: _Rows, max_tokens: int, max_cost: float) -> list[list[int]]:
    runs: list[list[int]] = []
    tokens, spent = 0, 0.0
    present: set[int] = set()
    for row in rows.order:
        saved = rows.shared[row] if rows.groups[row] in present else 0
        more, dearer = rows.lengths[row] - saved, cost(rows.lengths[row]) - cost(saved)
        if not runs or tokens + more > max_tokens or spent + dearer > max_cost:
            runs.append([])
            more, dearer = rows.lengths[row], cost(rows.lengths[row])
            tokens, spent, present = 0, 0.0, set()
        runs[-1].append(row)
        present.add(rows.groups[row])
        tokens += more
        spent += dearer
    return runs
