"""Per-token losses and their aggregation over packed tokens: pure functions of tensors.

Shapes: B rows, T packed tokens of all rows. Values keep the dtype of the log-probabilities.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlayout.data.objective import Totals
from rlayout.errors import nearest

Aggregation = Literal["token_mean", "sequence_mean"]
"""``token_mean``: every token of the mini-batch counts the same (DAPO, arXiv 2503.14476, eq. 8).
``sequence_mean``: every row counts the same, its tokens share its weight (GRPO, arXiv 2402.03300, eq. 3).
"""


def check_aggregation(aggregation: str) -> None:
    """Refuse an unknown aggregation.

    Raises:
        ValueError: it is none of ``Aggregation``.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(
            f"aggregation {aggregation!r} is not known. {nearest(aggregation, get_args(Aggregation))}"
        )


def clipped_surrogate(
    log_ratio: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " T"]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, with r = exp(``log_ratio``).

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7; separate bounds as in DAPO (arXiv 2503.14476), eq. 10.

    Args:
        log_ratio: log-probability of the token now minus that when it was sampled [T].
        advantages: advantage of the token [T].
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def negative_log_likelihood(logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Cross-entropy of each token in nats [T]."""
    return -logprobs


def spread(values: Float[Tensor, " B"], lengths: Int[Tensor, " B"], num_tokens: int) -> Float[Tensor, " T"]:
    """Give every token its row's value [T]; ``num_tokens`` is the sum of ``lengths``, known to the caller."""
    # output_size spares a CUDA device the wait for the sum of the lengths.
    return values.repeat_interleave(lengths, output_size=num_tokens)


def token_weights(
    mask: Bool[Tensor, " T"],
    lengths: Int[Tensor, " B"],
    aggregation: Aggregation,
    dtype: torch.dtype,
) -> Float[Tensor, " T"]:
    """Weight of each token in the aggregated loss, before division by ``denominator`` [T].

    1 for a token under the mask with ``token_mean``, 1 / (its row's tokens under the mask) with
    ``sequence_mean``, and 0 outside of the mask. So a row without any such token adds nothing.
    """
    if aggregation == "token_mean":
        return mask.to(dtype)
    rows = torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths, output_size=len(mask))
    counts = torch.zeros(len(lengths), dtype=dtype, device=mask.device).index_add_(0, rows, mask.to(dtype))
    return mask.to(dtype) / counts.clamp(min=1)[rows]


def denominator(totals: Totals, aggregation: Aggregation) -> float:
    """What the weighted sum over the whole mini-batch is divided by."""
    return totals.tokens if aggregation == "token_mean" else totals.rows
