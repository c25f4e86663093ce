"""Packed variable-length sequences.

A batch is a set of rows. Each row is a sequence with a stable id, unique in the run, and the id of the
group that it belongs to (its prompt). Values come per token, packed one row after the other without
padding, or per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlayout.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Rows of a step.

    Attributes:
        ids: one id per row [B].
        groups: id of the prompt of each row [B]; a prompt's own row has its id as its group.
        lengths: tokens per row [B], int64.
        tokens: per-token values, key -> [T, ...] with T = sum of ``lengths``; a value at a token's place
            belongs to that token (its log-probability given those before it, its loss mask).
        rows: per-row values, key -> [B, ...] tensor or a tuple of B Python objects.
    """

    ids: tuple[int, ...]
    groups: tuple[int, ...]
    lengths: Tensor
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor | tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if not len(self.ids) == len(self.groups) == len(self.lengths):
            raise DataError(
                f"batch: {len(self.ids)} ids, {len(self.groups)} groups and {len(self.lengths)} lengths"
            )
        for key, value in self.tokens.items():
            if len(value) != total:
                raise DataError(f"batch: {key!r} has {len(value)} values for {total} tokens")
        for key, value in self.rows.items():
            if len(value) != len(self.ids):
                raise DataError(f"batch: {key!r} has {len(value)} values for {len(self.ids)} rows")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.tokens, *self.rows)

    @property
    def offsets(self) -> Tensor:
        """Where each row starts in the packed values, and the end of the last: [B + 1], int64."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def select(self, indices: Sequence[int]) -> Batch:
        """The rows at ``indices``, in that order."""
        offsets = self.offsets.tolist()
        spans = [slice(offsets[i], offsets[i + 1]) for i in indices]
        picked = torch.tensor(list(indices), dtype=torch.int64)
        return Batch(
            ids=tuple(self.ids[i] for i in indices),
            groups=tuple(self.groups[i] for i in indices),
            lengths=self.lengths[picked],
            tokens={k: torch.cat([v[s] for s in spans]) if spans else v[:0] for k, v in self.tokens.items()},
            rows={k: _pick(v, picked) for k, v in self.rows.items()},
        )

    def with_values(
        self,
        tokens: Mapping[str, Tensor] | None = None,
        rows: Mapping[str, Tensor | tuple[Any, ...]] | None = None,
    ) -> Batch:
        """A copy with more (or replaced) values."""
        return replace(self, tokens={**self.tokens, **(tokens or {})}, rows={**self.rows, **(rows or {})})

    def to(self, device: torch.device) -> Batch:
        """A copy whose values are on ``device``; ids and lengths stay where they are."""
        return replace(
            self,
            tokens={k: v.to(device) for k, v in self.tokens.items()},
            rows={k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.rows.items()},
        )

    def only(self, keys: Sequence[str]) -> Batch:
        """A copy with just these keys (those that it has)."""
        return replace(
            self,
            tokens={k: v for k, v in self.tokens.items() if k in keys},
            rows={k: v for k, v in self.rows.items() if k in keys},
        )

    def objects(self, key: str) -> tuple[Any, ...]:
        """The Python objects of the per-row key ``key``."""
        value = self.rows[key]
        if isinstance(value, Tensor):
            raise DataError(f"batch: {key!r} holds numbers, not objects")
        return value

    def numbers(self, key: str) -> Tensor:
        """The tensor of the per-row key ``key``."""
        value = self.rows[key]
        if not isinstance(value, Tensor):
            raise DataError(f"batch: {key!r} holds objects, not numbers")
        return value

    def per_row(self, key: str) -> list[Tensor]:
        """The per-token values of ``key``, split into one tensor per row."""
        return list(self.tokens[key].split(self.lengths.tolist()))


def concat(batches: Sequence[Batch]) -> Batch:
    """All rows of ``batches`` one after the other; they must have the same keys."""
    if not batches:
        raise DataError("batch: nothing to concatenate")
    first = batches[0]
    for other in batches[1:]:
        if set(other.keys) != set(first.keys):
            raise DataError(f"batch: keys differ: {sorted(first.keys)} and {sorted(other.keys)}")
    return Batch(
        ids=tuple(i for b in batches for i in b.ids),
        groups=tuple(g for b in batches for g in b.groups),
        lengths=torch.cat([b.lengths for b in batches]),
        tokens={k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens},
        rows={k: _join([b.rows[k] for b in batches]) for k in first.rows},
    )


def _pick(value: Tensor | tuple[Any, ...], indices: Tensor) -> Tensor | tuple[Any, ...]:
    if isinstance(value, Tensor):
        return value[indices]
    return tuple(value[i] for i in indices.tolist())


def _join(values: Sequence[Tensor | tuple[Any, ...]]) -> Tensor | tuple[Any, ...]:
    if all(isinstance(v, Tensor) for v in values):
        return torch.cat([v for v in values if isinstance(v, Tensor)])
    return tuple(item for v in values for item in v)
