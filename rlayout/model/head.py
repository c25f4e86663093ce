"""From hidden states to log-probabilities and entropies of given tokens, a slice of the vocabulary at a time.

Logits of N tokens over V words would take N x V numbers; here at most ``SLICE_ELEMENTS`` exist at once. The
backward pass computes them again. The weight is read once and its gradient written once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

SLICE_ELEMENTS = 1 << 23


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
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float):
        precise = torch.promote_types(hidden.dtype, torch.float32)
        num = len(hidden)
        top = torch.full((num,), -torch.inf, dtype=precise, device=hidden.device)
        total, weighted = torch.zeros_like(top), torch.zeros_like(top)
        chosen = torch.empty_like(top)
        for words, logits in _logit_slices(hidden, weight, temperature, precise):
            _pick(logits, targets, words, chosen)
            # Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867): sums relative to the top so far.
            higher = torch.maximum(top, logits.amax(-1))
            shrink = (top - higher).exp_()
            logits.sub_(higher[:, None])
            exped = logits.exp()
            # The sum of exp(x) x shifts with its reference: x is measured from the new top.
            moved = torch.where(total > 0, (top - higher) * total, 0.0)
            weighted = (weighted + moved) * shrink + torch.linalg.vecdot(exped, logits)
            total = total * shrink + exped.sum(-1)
            top = higher
        log_total = total.log()
        normaliser = top + log_total
        ctx.save_for_backward(hidden, weight, targets, normaliser)  # pyright: ignore
        ctx.temperature = temperature  # pyright: ignore[reportAttributeAccessIssue]
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):
        hidden, weight, targets, normaliser = ctx.saved_tensors
        scale = (grad / ctx.temperature).to(normaliser.dtype)
        grad_hidden = torch.zeros(hidden.shape, dtype=normaliser.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        hidden_t = hidden.t().contiguous()
        for words, logits in _logit_slices(hidden, weight, ctx.temperature, normaliser.dtype):
            # d logprob / d logits = onehot - softmax
            grad_logits = logits.sub_(normaliser[:, None]).exp_().mul_(-scale[:, None])
            _add_at(grad_logits, targets, words, scale)
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden += narrow @ weight[words]
            grad_weight[words] = (hidden_t @ narrow).t()
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def _logit_slices(
    hidden: Tensor, weight: Tensor, temperature: float, precise: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (words, logits / temperature of those words [N, words]); the logits may be overwritten."""
    width = max(1, SLICE_ELEMENTS // max(1, len(hidden)))
    for low in range(0, len(weight), width):
        words = slice(low, min(low + width, len(weight)))
        logits = (hidden @ weight[words].t()).to(precise)
        yield words, logits if temperature == 1 else logits.div_(temperature)


def _inside(targets: Tensor, words: slice) -> Tensor:
    return ((targets >= words.start) & (targets < words.stop)).nonzero().flatten()


def _pick(logits: Tensor, targets: Tensor, words: slice, out: Tensor) -> None:
    rows = _inside(targets, words)
    out[rows] = logits[rows, targets[rows] - words.start]


def _add_at(logits: Tensor, targets: Tensor, words: slice, values: Tensor) -> None:
    rows = _inside(targets, words)
    logits[rows, targets[rows] - words.start] += values[rows]
