"""Per-token estimators of KL(p || q) from samples of p (Schulman 2020, *Approximating KL divergence*).

http://joschu.net/blog/kl-approx.html. All take log-probabilities [T] of the sampled tokens in nats and
return [T] of the same dtype. With r = q/p at the sample: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def k1(logprobs: Float[Tensor, " T"], other: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Unbiased, high variance, negative for about half of the samples.

    Args:
        logprobs: under p, the policy that the tokens were sampled from.
        other: under q.
    """
    return logprobs - other


def k2(logprobs: Float[Tensor, " T"], other: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Biased but low in variance and never negative; arguments as for ``k1``."""
    return (logprobs - other).square() / 2


def k3(logprobs: Float[Tensor, " T"], other: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Unbiased and never negative; arguments as for ``k1``. GRPO's penalty (arXiv 2402.03300, eq. 4)."""
    log_r = other - logprobs
    # expm1 keeps the digits that exp(x) - 1 loses for policies that are nearly equal.
    return log_r.expm1() - log_r
