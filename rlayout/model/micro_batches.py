"""How the rows of a call are divided into micro-batches: a pure function of their lengths."""

from __future__ import annotations

from collections.abc import Sequence

# Attention makes a token dearer the longer its row is. In a row of this many tokens attention costs about
# as much as the matrix products (135M parameters on CPU; larger models later). It only steers the balance.
ATTENTION_PARITY_TOKENS = 8192


def split(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide rows into micro-batches of at most ``max_tokens`` tokens; a longer row is one of its own.

    There are as few micro-batches as first-fit decreasing finds. Where as few runs of the rows sorted by
    length do as well, rows of similar length meet (attention computes equal lengths together) and the
    dearest run is as cheap as it can be. Within a micro-batch rows are sorted by length.

    Args:
        lengths: tokens of each row, at least 1.
        max_tokens: bound of a micro-batch.

    Returns:
        Indices into ``lengths``, each exactly once.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if lengths and min(lengths) < 1:
        raise ValueError(f"a row must have at least 1 token, got {min(lengths)}")
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    packed = _first_fit_decreasing(order, lengths, max_tokens)
    runs = _balanced_runs(order, lengths, max_tokens)
    return runs if len(runs) <= len(packed) else packed


def cost(length: int) -> float:
    """Relative cost of a row, in tokens of a very short one."""
    return length * (1 + length / ATTENTION_PARITY_TOKENS)


def _first_fit_decreasing(order: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in reversed(order):
        place = next((b for b, free in enumerate(room) if free >= lengths[row]), None)
        if place is None:
            bins.append([row])
            room.append(max_tokens - lengths[row])
        else:
            bins[place].append(row)
            room[place] -= lengths[row]
    return [rows[::-1] for rows in bins]


def _balanced_runs(order: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fewest consecutive runs of ``order``; of those divisions, the one whose dearest run is cheapest."""
    runs = _runs(order, lengths, max_tokens, float("inf"))
    low, high = 0.0, sum(cost(n) for n in lengths)
    # The bound only steers the balance: half a percent of the whole is near enough.
    while high - low > 0.005 * high:
        middle = (low + high) / 2
        tried = _runs(order, lengths, max_tokens, middle)
        if len(tried) <= len(runs):
            runs, high = tried, middle
        else:
            low = middle
    return runs


def _runs(order: list[int], lengths: Sequence[int], max_tokens: int, max_cost: float) -> list[list[int]]:
    runs: list[list[int]] = []
    tokens, spent = 0, 0.0
    for row in order:
        length = lengths[row]
        if not runs or tokens + length > max_tokens or spent + cost(length) > max_cost:
            runs.append([])
            tokens, spent = 0, 0.0
        runs[-1].append(row)
        tokens += length
        spent += cost(length)
    return runs
