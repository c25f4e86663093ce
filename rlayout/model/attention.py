"""Attention of packed sequences: each token to those before it in its own sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlayout.spec.model_shape import ModelShape


class PackedAttention:
    """Causal attention within each of the packed sequences, limited to the layer's window where it has one."""

    def __init__(self, lengths: Tensor, shape: ModelShape) -> None:
        """``lengths``: tokens of each sequence [B], int64."""
        self.lengths: list[int] = lengths.tolist()
        self.shape = shape

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Attention output [T, H, d] of rotated queries and keys."""
        window = self.shape.window(layer)
        q, k, v = (x.split(self.lengths) for x in (q_THd, k_TKd, v_TKd))
        return torch.cat([_attend(*sequence, window) for sequence in zip(q, k, v, strict=True)])


def _attend(q_LHd: Tensor, k_LKd: Tensor, v_LKd: Tensor, window: int | None) -> Tensor:
    q_HLd, k_KLd, v_KLd = (x.transpose(0, 1) for x in (q_LHd, k_LKd, v_LKd))
    length = len(q_LHd)
    mask = None
    if window is not None and window < length:
        here = torch.arange(length, device=q_LHd.device)
        behind = here[:, None] - here[None, :]
        mask = (behind >= 0) & (behind < window)
    out_HLd = F.scaled_dot_product_attention(
        q_HLd[None], k_KLd[None], v_KLd[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )[0]
    return out_HLd.transpose(0, 1)
