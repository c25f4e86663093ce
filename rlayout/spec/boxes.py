"""Index boxes: rectangular parts of a tensor, as (start, stop) per dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]
"""(start, stop) per dimension, stop excluded. The box of a scalar is ()."""


def whole(shape: Sequence[int]) -> Box:
    """The box of all of a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def intersect(left: Box, right: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None where they have no element in common."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def numel(box: Box) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in box)
