"""Where the values of a step are: the controller knows rows and keys, never the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlayout.data.batch import Batch, concat
from rlayout.errors import DataError


@dataclass(frozen=True)
class Rows:
    """Which rows a piece holds, as plain numbers."""

    ids: tuple[int, ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch) -> Rows:
        return cls(batch.ids, batch.groups, tuple(batch.lengths.tolist()))


@dataclass(frozen=True)
class Piece:
    """Some rows of some keys, held in the object store under ``reference``."""

    rows: Rows
    keys: tuple[str, ...]
    reference: Any


class Store:
    """The pieces of one step."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def rows_of(self, keys: Sequence[str]) -> Rows:
        """The rows that a call over ``keys`` works on, in the order of their ids.

        Where prompts and their samples both occur, they are the samples: a prompt's value belongs to
        each of its samples.
        """
        spaces = [self._rows_of_key(key) for key in keys]
        return max(spaces, key=lambda rows: (self._derived(rows), len(rows.ids)))

    def pieces_for(self, rows: Rows, ids: Sequence[int], keys: Sequence[str]) -> list[Piece]:
        """The pieces that hold a value of ``keys`` for one of ``ids`` or for its prompt."""
        group_of = dict(zip(rows.ids, rows.groups, strict=True))
        wanted = set(ids)
        prompts = {group_of[i] for i in ids}
        return [
            piece
            for piece in self._pieces
            if set(piece.keys) & set(keys)
            and (prompts if self._is_prompts(piece.rows) else wanted) & set(piece.rows.ids)
        ]

    def _rows_of_key(self, key: str) -> Rows:
        pieces = [p for p in self._pieces if key in p.keys]
        if not pieces:
            raise DataError(f"key {key!r} has not been produced in this step")
        merged = sorted(
            item for p in pieces for item in zip(p.rows.ids, p.rows.groups, p.rows.lengths, strict=True)
        )
        ids, groups, lengths = zip(*merged, strict=True)
        return Rows(ids, groups, lengths)

    def _derived(self, rows: Rows) -> bool:
        return not self._is_prompts(rows)

    @staticmethod
    def _is_prompts(rows: Rows) -> bool:
        return rows.ids == rows.groups


def assemble(pieces: Sequence[Batch], ids: Sequence[int], groups: Sequence[int], keys: Sequence[str]) -> Batch:
    """Join pieces into one batch of the rows ``ids`` with ``keys``.

    A per-row value that only the row's prompt has is taken from there.

    Raises:
        DataError: a key or a row is in no piece.
    """
    result: Batch | None = None
    for key in keys:
        holders = [p.only([key]) for p in pieces if key in p.keys]
        if not holders:
            raise DataError(f"key {key!r} is in none of the {len(pieces)} pieces that arrived")
        joined = concat(holders)
        place = {row: index for index, row in enumerate(joined.ids)}
        by_prompt = not all(i in place for i in ids)
        wanted = groups if by_prompt else ids
        missing = [i for i in wanted if i not in place]
        if missing:
            raise DataError(f"key {key!r} has no value for row {missing[0]}")
        picked = joined.select([place[i] for i in wanted])
        if by_prompt and key in picked.tokens:
            raise DataError(f"key {key!r} has a value per token of the prompt; row {ids[0]} is a sample of it")
        result = _merge(result, picked, ids, groups)
    if result is None:
        raise DataError("a call without inputs has no rows")
    return result


def _merge(into: Batch | None, picked: Batch, ids: Sequence[int], groups: Sequence[int]) -> Batch:
    if into is None:
        return Batch(tuple(ids), tuple(groups), picked.lengths, picked.tokens, picked.rows)
    if picked.tokens and not into.tokens:
        # Lengths are those of the per-token values; a per-row value from the prompt has others.
        into = Batch(into.ids, into.groups, picked.lengths, {}, into.rows)
    return into.with_values(picked.tokens, picked.rows)
