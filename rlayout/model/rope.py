"""Rotary position embedding and its variants for longer contexts.

A head's first and second half are pairs of coordinates; pair ``i`` at position ``p`` is rotated by
``p * inverse_frequencies[i]`` radians. Numbers agree with transformers' ``modeling_rope_utils`` (angles in
float32, then cast to the model's dtype).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlayout.model import functional
from rlayout.spec.model_shape import ModelShape, RopeScaling


class Rotation(NamedTuple):
    """Rotation of each token, for all heads and layers; made once per forward pass."""

    cos_T1d: Tensor
    sin_T1d: Tensor
    """Negated in the first half, so that ``x.roll(d / 2)`` needs no sign."""


def rotation(positions_T: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
    """The rotation of each token.

    Args:
        positions_T: place of each token in its sequence [T], int64.
        inverse_frequencies: radians per position of each pair [d / 2], float32.
        scale: factor on the cosines and sines (yarn's attention factor; otherwise 1).
        dtype: of the result, and of the queries and keys that it is for.
    """
    angles = positions_T[:, None, None].float() * inverse_frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return Rotation(torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype))


def rotate(x_THd: Tensor, by: Rotation) -> Tensor:
    """Queries or keys [T, heads, d], rotated."""
    return functional.rotate(x_THd, by.cos_T1d, by.sin_T1d)


def frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Radians per position of each pair [head_dim / 2], float32, and the factor on cosines and sines."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, scaling, shape.rope_theta), attention_factor(scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are slowed by ``factor``, short ones kept, those between interpolated (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(plain: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Slow pairs are interpolated, fast ones kept (YaRN, arXiv 2309.00071, section 3.2)."""
    pairs = len(plain)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001  # a ramp of no length would divide by zero
    keep = 1 - ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def attention_factor(scaling: RopeScaling) -> float:
    """YaRN's factor on cosines and sines: given, or inferred from the factor (section 3.4)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
