"""Random numbers that depend on what is drawn, not on who draws it or in which order.

A generator with state would tie a token to the batch that it was drawn in. Here every number is a hash
of its name: (seed, step, sequence id, position, index).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def uniforms(seed: int, step: int, sequence_ids: Tensor, positions: Tensor, count: int) -> Tensor:
    """Uniform numbers for the token at ``positions`` of each sequence.

    Each name is absorbed in turn by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), whose
    every output bit depends on every input bit.

    Args:
        seed: seed of the run.
        step: training step.
        sequence_ids: id of each sequence [B], int64.
        positions: position of the token that is drawn [B], int64.
        count: numbers per token.

    Returns:
        Float64 numbers in [0, 1), multiples of 2**-53: [B, count].
    """
    state = torch.full_like(sequence_ids, _signed(seed))
    state = _mix(_mix(state) + _signed(step))
    state = _mix(_mix(state + sequence_ids) + positions)
    index = torch.arange(1, count + 1, device=state.device) * _signed(_GOLDEN)
    bits = _mix(state[:, None] + index)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64; products and sums wrap around."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's ``>>`` copies the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63
