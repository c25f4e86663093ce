"""Keys and values of running sequences, one slot of fixed length for each, and attention that uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlayout.model import native
from rlayout.model.attention import PackedAttention
from rlayout.spec.model_shape import ModelShape

_LANES = 32
"""The C kernel takes heads of a multiple of this size."""


def token_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the cache: keys and values of all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


class Cache:
    """Slots of ``capacity`` tokens.

    Attributes:
        keys: rotated keys of each layer [slots, capacity, K, d]. Zeros where nothing was written: a masked
            place adds 0 times its value, which must not be the NaN of unset memory. A tensor per layer is
            small enough for the memory that a CPU process keeps (see host_memory.py).
        values: the same.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = (2, num_slots, capacity, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self.num_slots = num_slots
        self.capacity = capacity
        self._layers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.keys = [layer[0] for layer in self._layers]
        self.values = [layer[1] for layer in self._layers]

    def write(self, layer: int, places_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Store tokens at ``places_T``: slot * capacity + position [T], int64."""
        self.keys[layer].flatten(0, 1).index_copy_(0, places_T, k_TKd)
        self.values[layer].flatten(0, 1).index_copy_(0, places_T, v_TKd)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a slot to another."""
        for layer in self._layers:
            layer[:, target, :length] = layer[:, source, :length]


@dataclass(frozen=True)
class PrefillAttention:
    """Attention of packed prompts, each from its first token, that also fills their slots."""

    cache: Cache
    places_T: Tensor
    packed: PackedAttention

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        self.cache.write(layer, self.places_T, k_TKd, v_TKd)
        return self.packed(layer, q_THd, k_TKd, v_TKd)


class DecodeAttention:
    """Attention of one new token for each of the first B slots, to what its slot holds."""

    def __init__(self, cache: Cache, positions_B: Tensor) -> None:
        """Prepare one step for all layers.

        Args:
            cache: holds the tokens before the new ones.
            positions_B: position of the new token in its sequence [B], int64.
        """
        self._cache = cache
        self._positions_B = positions_B
        slots = torch.arange(len(positions_B), device=positions_B.device)
        self._places_B = slots * cache.capacity + positions_B
        self._native = native.usable(cache.keys[0]) and cache.shape.head_dim % _LANES == 0
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, q_BHd: Tensor, k_BKd: Tensor, v_BKd: Tensor) -> Tensor:
        self._cache.write(layer, self._places_B, k_BKd, v_BKd)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        window = self._cache.shape.window(layer)
        if self._native:
            return _attend_native(q_BHd.contiguous(), keys, values, self._positions_B, window)
        if window not in self._masks:
            self._masks[window] = _mask(self._positions_B, window, keys.dtype)
        return _attend(q_BHd, keys, values, self._masks[window])


def _attend_native(
    q_BHd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, positions_B: Tensor, window: int | None
) -> Tensor:
    """Reads just the places that each sequence sees, once for all query heads of a kv head [B, H, d]."""
    out_BHd = torch.empty_like(q_BHd)
    batch, heads, size = q_BHd.shape
    capacity, kv_heads = keys_SLKd.shape[1:3]
    native.call(
        "decode_attention",
        *(q_BHd, keys_SLKd, values_SLKd, out_BHd, positions_B),
        *(batch, heads, kv_heads, size, capacity, window or capacity, size**-0.5),
    )
    return out_BHd


def _attend(q_BHd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, mask_B11L: Tensor) -> Tensor:
    """Reads as many places of every slot as the mask has [B, H, d]."""
    batch, length = len(q_BHd), mask_B11L.shape[-1]
    k_BKLd = keys_SLKd[:batch, :length].transpose(1, 2)
    v_BKLd = values_SLKd[:batch, :length].transpose(1, 2)
    if q_BHd.device.type == "cpu":
        # One query per head is a fifth faster than a few (measured, 64 sequences, 1 thread).
        out_BH1d = F.scaled_dot_product_attention(
            q_BHd[:, :, None], k_BKLd, v_BKLd, attn_mask=mask_B11L, enable_gqa=True
        )
        return out_BH1d[:, :, 0]
    # Fused CUDA kernels that take a mask know no grouped heads: the query heads of one kv head stand in the
    # place of query tokens, so keys are not expanded.
    q_BKGd = q_BHd.unflatten(1, (k_BKLd.shape[1], -1))
    mask = mask_B11L.expand(batch, 1, q_BKGd.shape[2], length)
    return F.scaled_dot_product_attention(q_BKGd, k_BKLd, v_BKLd, attn_mask=mask).flatten(1, 2)


def _mask(positions_B: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 for the places that the new token sees and minus infinity for the others [B, 1, 1, L]."""
    length = int(positions_B.max()) + 1
    behind = positions_B[:, None, None, None] - torch.arange(length, device=positions_B.device)
    hidden = behind < 0
    if window is not None:
        hidden |= behind >= window
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
