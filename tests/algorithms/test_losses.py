import math

import jaxtyping
import pytest
import torch

from rlayout.algorithms.losses import (
    clipped_surrogate,
    denominator,
    negative_log_likelihood,
    spread,
    token_weights,
)
from rlayout.data.objective import Totals


def test_clipped_surrogate_by_hand():
    # ratio, advantage -> -min(r A, clip(r, 0.8, 1.3) A)
    cases = [
        (1.0, 2.0, -2.0),
        (1.2, 2.0, -2.4),  # inside the upper bound
        (2.0, 2.0, -2.6),  # cut at 1.3
        (2.0, -2.0, 4.0),  # a bad token that became likelier is never cut
        (0.5, 2.0, -1.0),  # a good token that became rarer is never cut
        (0.5, -2.0, 1.6),  # cut at 0.8
        (1.5, 0.0, 0.0),
    ]
    ratio, advantages, expected = torch.tensor(cases, dtype=torch.float64).T
    found = clipped_surrogate(ratio.log(), advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(found, expected)


def test_a_clipped_token_has_no_gradient():
    log_ratio = torch.tensor([2.0, 0.5, 2.0, 0.5, 1.0]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    clipped_surrogate(log_ratio, advantages, clip_low=0.2, clip_high=0.3).sum().backward()
    assert log_ratio.grad is not None
    # d(-r A)/d(log r) = -r A where it is not cut
    torch.testing.assert_close(log_ratio.grad, torch.tensor([0.0, 0.0, 2.0, -0.5, -1.0]))


def test_negative_log_likelihood_is_cross_entropy():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([0, 3, 6, 2, 2])
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    torch.testing.assert_close(negative_log_likelihood(logprobs), expected)


def test_weights_by_hand():
    # rows of 3, 2, 0 and 2 tokens; the second has no token under the mask
    mask = torch.tensor([False, True, True, False, False, True, True])
    lengths = torch.tensor([3, 2, 0, 2])
    token_mean = token_weights(mask, lengths, "token_mean", torch.float64)
    sequence_mean = token_weights(mask, lengths, "sequence_mean", torch.float64)
    assert token_mean.tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert sequence_mean.tolist() == [0, 0.5, 0.5, 0, 0, 0.5, 0.5]


def test_denominator():
    totals = Totals(tokens=7.0, rows=3.0)
    assert denominator(totals, "token_mean") == 7.0
    assert denominator(totals, "sequence_mean") == 3.0


def test_spread_repeats_the_value_of_a_row():
    found = spread(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1]), 3)
    assert found.tolist() == [1.0, 1.0, 3.0]


def test_shapes_are_checked_in_these_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        clipped_surrogate(torch.zeros(3), torch.zeros(4), clip_low=0.2, clip_high=0.2)
    with pytest.raises(jaxtyping.TypeCheckError):
        token_weights(torch.ones(3), torch.tensor([3]), "token_mean", torch.float32)  # pyright: ignore


def test_huge_ratio_against_a_good_token_stays_finite():
    loss = clipped_surrogate(torch.tensor([200.0]), torch.tensor([1.0]), clip_low=0.2, clip_high=0.2)
    assert math.isclose(loss.item(), -1.2, rel_tol=1e-6)
