"""Draws one token per row of logits.

The draw must not depend on the last bits of the logits, which change a little with the shape of the
batch. The usual inverse of the cumulative distribution has one boundary per token, and each moves with
the rounding of all logits before it: errors of 1e-5 in 49,152 logits change one draw in 200. Here the
vocabulary is the leaves of a binary tree, and a walk from the root turns left or right in proportion to
the probability below each branch, with a fresh random number at each of the log2(V) turns. Only these
few comparisons can change, each with a probability of about the error of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlayout.errors import ModelError
from rlayout.spec.sampling import Sampling

_FIRST_CANDIDATES = 256
"""Tokens looked at first for top-p; nearly always enough, and far cheaper than a full sort."""


def draws_per_token(vocab_size: int) -> int:
    """Random numbers that :func:`draw` needs for one token: the depth of the tree."""
    return max(1, (vocab_size - 1).bit_length())


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from each row.

    Args:
        logits: [B, V], any float dtype; not changed.
        sampling: temperature, top-k and top-p.
        uniforms: float64 in [0, 1) [B, draws_per_token(V)].

    Returns:
        Tokens [B] int64 and their log-probabilities [B] float32 under the distribution they were drawn
        from: after temperature, top-k, top-p and renormalisation.

    Raises:
        ModelError: a row has no finite distribution.
    """
    if sampling.greedy:
        _require_finite(logits.amax(-1))
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)
    weights = restrict(logits, sampling)
    levels = _tree(weights)
    total = levels[-1][:, 0]
    _require_finite(total)
    tokens = _descend(levels, uniforms)
    return tokens, (weights.gather(-1, tokens[:, None])[:, 0] / total).log()


def restrict(logits: Tensor, sampling: Sampling) -> Tensor:
    """Turn logits into unnormalised probabilities, 0 for the tokens that top-k or top-p cut off.

    Tokens as probable as the last one kept are kept as well, so that the result does not depend on the
    order of equals.

    Args:
        logits: [B, V], any float dtype.
        sampling: temperature (not 0), top-k and top-p.

    Returns:
        [B, V] float32; the largest of each row is 1.
    """
    scores = logits.to(torch.float32, copy=True)
    scores -= scores.amax(-1, keepdim=True)
    if sampling.temperature != 1:
        scores /= sampling.temperature
    weights = scores.exp_()
    if 0 < sampling.top_k < weights.shape[-1]:
        _cut_below(weights, weights.topk(sampling.top_k, dim=-1).values[:, -1])
    if sampling.top_p < 1:
        _cut_below(weights, _nucleus_threshold(weights, sampling.top_p))
    return weights


def _nucleus_threshold(weights: Tensor, top_p: float) -> Tensor:
    """Weight of the last token of the smallest set that holds ``top_p`` of each row's mass [B]."""
    goal = top_p * weights.sum(-1, dtype=torch.float64)
    count = min(_FIRST_CANDIDATES, weights.shape[-1])
    while True:
        best = weights.topk(count, dim=-1).values
        missing = best.cumsum(-1, dtype=torch.float64) < goal[:, None]
        if count == weights.shape[-1] or not bool(missing[:, -1].any()):
            last = missing.sum(-1).clamp(max=count - 1)
            return best.gather(-1, last[:, None])[:, 0]
        count = min(16 * count, weights.shape[-1])


def _cut_below(weights: Tensor, threshold: Tensor) -> None:
    weights.masked_fill_(weights < threshold[:, None], 0)


def _tree(weights: Tensor) -> list[Tensor]:
    """Sums of weights, from the leaves [B, V] to the root [B, 1]; node i of a level adds i and i + half."""
    levels = [weights]
    while (size := levels[-1].shape[-1]) > 1:
        below, half = levels[-1], (size + 1) // 2
        if size % 2:
            above = below[:, :half].clone()
            above[:, : size - half] += below[:, half:]
        else:
            above = below[:, :half] + below[:, half:]
        levels.append(above)
    return levels


def _descend(levels: list[Tensor], uniforms: Tensor) -> Tensor:
    """Walk from the root to a leaf; a branch of weight 0 is never taken [B]."""
    node = torch.zeros_like(uniforms[:, :1], dtype=torch.int64)
    for depth, level in enumerate(reversed(levels[:-1])):
        size = level.shape[-1]
        half = (size + 1) // 2
        left = level.gather(-1, node).to(torch.float64)
        right = level.gather(-1, (node + half).clamp(max=size - 1)).to(torch.float64)
        right = torch.where(node + half < size, right, 0.0)
        turn = uniforms[:, depth : depth + 1] * (left + right) >= left
        node = torch.where(turn, node + half, node)
    return node[:, 0]


def _require_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        rows = (~values.isfinite()).nonzero()[:, 0].tolist()
        raise ModelError(
            f"generation: the logits of {len(rows)} of {len(values)} sequences are not finite "
            f"(first: row {rows[0]}); the weights are broken, usually by a diverged update"
        )
