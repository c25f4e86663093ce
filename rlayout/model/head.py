"""From hidden states to log-probabilities and entropies of given tokens, a slice of the vocabulary at a time.

Logits of N tokens over V words would take N x V numbers; here at most ``SLICE_ELEMENTS`` exist at once. The
backward pass computes them again. The weight is read once and its gradient written once.
"""

# autograd.Function types its methods for one signature only.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlayout.model import native
from rlayout.model.functional import add_matrix_gradient, add_to

SLICE_ELEMENTS = 1 << 22


def head_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats) of ``targets`` under softmax(hidden weight^T / temperature).

    Args:
        hidden: [N, D].
        weight: [V, D], same dtype.
        targets: token ids [N], int64.
        temperature: above 0.

    Returns:
        log-probabilities [N] with gradient and entropies [N] without, in float32 (float64 for float64).
    """
    return _HeadScores.apply(hidden, weight, targets, temperature)  # pyright: ignore[reportReturnType]


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        chosen = torch.empty(len(hidden), dtype=precise, device=hidden.device)
        sums = RunningSoftmax.start(chosen)
        for words, logits in _logit_slices(hidden, weight):
            rows = ((targets >= words.start) & (targets < words.stop)).nonzero().flatten()
            chosen[rows] = logits[rows, targets[rows] - words.start].to(precise) / temperature
            sums.add(logits, temperature)
        ctx.save_for_backward(hidden, weight, targets, sums.normaliser())
        ctx.temperature = temperature
        entropy = sums.entropy()
        ctx.mark_non_differentiable(entropy)
        return chosen - sums.normaliser(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        scale = (grads[0] / ctx.temperature).contiguous()
        grad_hidden = torch.zeros(hidden.shape, dtype=normaliser.dtype, device=hidden.device)
        parts: list[Tensor] = []
        for words, logits in _logit_slices(hidden, weight):
            grad_logits = logit_gradient(logits, normaliser, scale, targets - words.start, ctx.temperature)
            add_to(grad_hidden, grad_logits @ weight[words])
            part = add_matrix_gradient(weight, grad_logits, hidden, words)
            if part is not None:
                parts.append(part)
        return grad_hidden.to(hidden.dtype), torch.cat(parts) if parts else None, None, None


def _logit_slices(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield words and the logits of those words [N, words], which may be overwritten."""
    width = max(1, SLICE_ELEMENTS // max(1, len(hidden)))
    for low in range(0, len(weight), width):
        words = slice(low, min(low + width, len(weight)))
        yield words, hidden @ weight[words].t()


@dataclass(frozen=True)
class RunningSoftmax:
    """Sums over the words so far, relative to the largest of them (Milakov and Gimelshein 2018, arXiv
    1805.02867): ``total`` of exp(x - top), ``weighted`` of exp(x - top) (x - top); each [N].
    """

    top: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def start(cls, like: Tensor) -> RunningSoftmax:
        return cls(torch.full_like(like, -torch.inf), torch.zeros_like(like), torch.zeros_like(like))

    def add(self, logits: Tensor, temperature: float) -> None:
        """Take in more words' ``logits`` [N, words], which may be changed."""
        if native.usable(logits):
            sums = (self.top, self.total, self.weighted)
            native.call("head_add", logits, *sums, *logits.shape, 1 / temperature)
            return
        x = logits.to(self.top.dtype).div_(temperature)
        top = torch.maximum(self.top, x.amax(-1))
        x -= top[:, None]
        exped = x.exp()
        shift = torch.where(self.total > 0, self.top - top, 0.0)  # -inf at the start
        self.weighted.add_(shift * self.total).mul_(shift.exp()).add_(torch.linalg.vecdot(exped, x))
        self.total.mul_(shift.exp()).add_(exped.sum(-1))
        self.top.copy_(top)

    def normaliser(self) -> Tensor:
        """Logarithm of the sum of exp(x) [N]."""
        return self.top + self.total.log()

    def entropy(self) -> Tensor:
        """Entropy in nats [N]."""
        return self.total.log() - self.weighted / self.total


def logit_gradient(
    logits: Tensor, normaliser: Tensor, scale: Tensor, targets: Tensor, temperature: float
) -> Tensor:
    """Return scale * (onehot(targets) - softmax) in the dtype of ``logits`` [N, words], which may be changed.

    A target outside of these words counts as none of them.
    """
    if native.usable(logits):
        arguments = (normaliser, scale, targets, *logits.shape, 1 / temperature)
        native.call("head_backward", logits, *arguments)
        return logits
    grad = logits.to(normaliser.dtype).div_(temperature).sub_(normaliser[:, None]).exp_().mul_(-scale[:, None])
    rows = ((targets >= 0) & (targets < logits.shape[1])).nonzero().flatten()
    grad[rows, targets[rows]] += scale[rows]
    return grad.to(logits.dtype)
