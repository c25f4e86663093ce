"""Softmax of attention scores under a causal mask and a window, and its gradient; in place where it can be.

Scores are [N, R, M]: N independent matrices of R rows, ``group`` rows per query, one after the other, and M
keys. Query ``i`` is key ``i + offset`` itself and sees the last ``window`` keys up to there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlayout.model import native


def causal_softmax(scores: Tensor, group: int, offset: int, window: int | None, scale: float) -> Tensor:
    """softmax(scale * scores) over the keys that a query sees, 0 elsewhere; ``scores`` may be overwritten."""
    if native.usable(scores):
        native.call("softmax", scores, *_sizes(scores, group, offset, window), scale)
        return scores
    hidden = ~visible(scores, group, offset, window)
    precise = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax((scores.to(precise) * scale).masked_fill(hidden, -torch.inf), -1).to(scores.dtype)


def causal_softmax_backward(
    probs: Tensor, grad: Tensor, group: int, offset: int, window: int | None, scale: float
) -> Tensor:
    """Gradient of the scores, given that of the probabilities, which may be overwritten."""
    if native.usable(probs, grad):
        native.call("softmax_backward", probs, grad, *_sizes(probs, group, offset, window), scale)
        return grad
    precise = torch.promote_types(probs.dtype, torch.float32)
    p, g = probs.to(precise), grad.to(precise)
    return (p * (g - (p * g).sum(-1, keepdim=True)) * scale).to(probs.dtype)


def visible(scores: Tensor, group: int, offset: int, window: int | None) -> Tensor:
    """Which keys each row sees [R, M], bool."""
    num_rows, num_keys = scores.shape[-2:]
    own = torch.arange(num_rows, device=scores.device)[:, None] // group + offset
    keys = torch.arange(num_keys, device=scores.device)
    seen = keys <= own
    return seen if window is None else seen & (keys > own - window)


def _sizes(scores: Tensor, group: int, offset: int, window: int | None) -> tuple[int, ...]:
    num, rows, keys = scores.shape
    return num, rows // group, group, keys, offset, window or offset + rows // group
