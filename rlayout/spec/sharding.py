"""Which part of a model a device holds under a layout. Every split of a parameter follows from here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlayout.errors import PlanError
from rlayout.spec.boxes import Box
from rlayout.spec.layout import Layout, Rank
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import Parameter, Unit, parameters

Range = tuple[int, int]
"""First unit and the one after the last."""


@dataclass(frozen=True)
class Part:
    """One stage of a model's pipeline, and of it one tensor rank's share.

    Attributes:
        shape: of the whole model.
        layers: the stage's layers [first, after the last).
        tensor: which tensor rank, of ``tp``.
        tp: number of tensor ranks.
    """

    shape: ModelShape
    layers: Range
    tensor: int
    tp: int

    @property
    def first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.layers[0] == 0

    @property
    def last(self) -> bool:
        """Whether it ends with the last norm and the head."""
        return self.layers[1] == self.shape.num_layers

    def units(self, unit: Unit) -> Range:
        """The units that this tensor rank computes."""
        heads = _heads(self.shape.num_kv_heads, self.shape.queries_per_kv, self.tp)[self.tensor]
        match unit:
            case Unit.QUERY_HEAD:
                return heads.queries
            case Unit.KV_HEAD:
                return heads.keys
            case Unit.INNER:
                return shares(self.shape.intermediate_size, self.tp)[self.tensor]
            case Unit.WORD:
                return shares(self.shape.vocab_size, self.tp)[self.tensor]

    def box(self, parameter: Parameter) -> Box | None:
        """The part of ``parameter`` that it holds, or None."""
        if not self._has_stage(parameter) or (parameter.once and self.tensor > 0):
            return None
        box = [(0, size) for size in parameter.shape]
        if parameter.split:
            dim, unit = parameter.split.dim, parameter.split.unit
            size = parameter.shape[dim] // num_units(self.shape, unit)
            start, stop = self.units(unit)
            box[dim] = (start * size, stop * size)
        return tuple(box)

    def _has_stage(self, parameter: Parameter) -> bool:
        if parameter.layer is not None:
            return self.layers[0] <= parameter.layer < self.layers[1]
        if parameter.name == "embedding.weight":
            return self.first or (self.last and self.shape.tie_embeddings)
        return self.last


def whole_model(shape: ModelShape) -> Part:
    """All of a model on one device."""
    return Part(shape, (0, shape.num_layers), 0, 1)


def part_of(shape: ModelShape, layout: Layout, rank: Rank) -> Part:
    """What the device at ``rank`` of ``layout`` holds; ``check`` the layout first."""
    return Part(shape, stages(shape, layout.pp)[rank.stage], rank.tensor, layout.tp)


def check(shape: ModelShape, layout: Layout) -> None:
    """Refuse a layout that would leave a device without work.

    Raises:
        PlanError: more tensor ranks than query heads, feed-forward rows or words, or more stages than layers.
    """
    for unit in (Unit.QUERY_HEAD, Unit.INNER, Unit.WORD):
        most = num_units(shape, unit)
        if layout.tp > most:
            raise PlanError(
                f"layout {layout}: tp {layout.tp} is more than the model's {most} parts of this kind: "
                f"{unit.value}. The nearest possible is tp {most}"
            )
    if layout.pp > shape.num_layers:
        raise PlanError(
            f"layout {layout}: pp {layout.pp} is more than the model's {shape.num_layers} layers. The nearest "
            f"possible is pp {shape.num_layers}"
        )


def num_units(shape: ModelShape, unit: Unit) -> int:
    """How many units of a kind a model has."""
    return {
        Unit.QUERY_HEAD: shape.num_heads,
        Unit.KV_HEAD: shape.num_kv_heads,
        Unit.INNER: shape.intermediate_size,
        Unit.WORD: shape.vocab_size,
    }[unit]


def shares(count: int, parts: int) -> tuple[Range, ...]:
    """Consecutive shares of ``count`` units, the first ones larger by one where it does not divide."""
    size, larger = divmod(count, parts)
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


@dataclass(frozen=True)
class _Heads:
    queries: Range
    keys: Range


@cache
def _heads(num_kv_heads: int, queries_per_kv: int, tp: int) -> tuple[_Heads, ...]:
    """The heads of each tensor rank: key-value heads with all of their query heads.

    Where there are more ranks than key-value heads, several hold the same one and divide its query heads.
    """
    if tp <= num_kv_heads:
        return tuple(
            _Heads((start * queries_per_kv, stop * queries_per_kv), (start, stop))
            for start, stop in shares(num_kv_heads, tp)
        )
    found = []
    for head, (first, after) in enumerate(shares(tp, num_kv_heads)):
        for start, stop in shares(queries_per_kv, after - first):
            own = head * queries_per_kv
            found.append(_Heads((own + start, own + stop), (head, head + 1)))
    return tuple(found)


@cache
def stages(shape: ModelShape, pp: int) -> tuple[Range, ...]:
    """The layers of each stage, such that the most expensive stage costs as little as possible.

    The cost is that of matrix products per token, so of weights; the head counts to the last stage. Looking
    an embedding up costs nothing.
    """
    layer = sum(p.numel for p in parameters(shape) if p.layer == 0)
    costs = [float(layer)] * shape.num_layers
    costs[-1] += shape.vocab_size * shape.hidden_size
    return divide(costs, pp)


def divide(costs: Sequence[float], parts: int) -> tuple[Range, ...]:
    """Consecutive ranges of at least one item; the largest sum of a range is the least possible.

    Among such divisions the earlier ranges are as long as they can be.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {(len(costs), 0): (0.0, len(costs))}

    def least(start: int, left: int) -> tuple[float, int]:
        """The largest sum when items from ``start`` on make ``left`` ranges, and where the first ends."""
        if (start, left) not in best:
            best[start, left] = min(
                (
                    (max(sums[stop] - sums[start], least(stop, left - 1)[0]), stop)
                    for stop in range(start + 1, len(costs) - left + 2)
                    if left > 1 or stop == len(costs)
                ),
                key=lambda choice: (choice[0], -choice[1]),
            )
        return best[start, left]

    ranges, start = [], 0
    for left in range(parts, 0, -1):
        stop = least(start, left)[1]
        ranges.append((start, stop))
        start = stop
    return tuple(ranges)
