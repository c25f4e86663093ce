"""Draws follow the distribution, cut as transformers cuts it, whatever the last bits of the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlayout.errors import ModelError
from rlayout.model.generation.randomness import uniforms
from rlayout.model.generation.sampler import draw, draws_per_token, restrict
from rlayout.spec.sampling import Sampling


def numbers_for(count: int, vocab_size: int, seed: int = 0) -> Tensor:
    here = torch.arange(count)
    return uniforms(seed, 0, here, torch.zeros_like(here), draws_per_token(vocab_size))


def random_logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that transformers samples from [B, V]."""
    warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 64, 101])
def test_draws_follow_the_distribution(vocab_size):
    count = 40_000
    probabilities = random_logits(1, vocab_size, spread=1.0).softmax(-1)
    logits = probabilities.log().expand(count, -1)
    tokens, _ = draw(logits, Sampling(), numbers_for(count, vocab_size))
    observed = torch.bincount(tokens, minlength=vocab_size)
    expected = probabilities[0].double() * count
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = vocab_size - 1
    # Wilson and Hilferty's approximation of the 99.99 % quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi_square <= limit


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (20, 1.0), (0, 0.9), (0, 0.3), (50, 0.8), (700, 0.99)]
)
def test_cuts_agree_with_transformers(temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = random_logits(32, 600)
    weights = restrict(logits, sampling)
    torch.testing.assert_close(
        weights / weights.sum(-1, keepdim=True), warped(logits, sampling), atol=1e-6, rtol=1e-5
    )


def test_nucleus_beyond_the_first_candidates():
    sampling = Sampling(top_p=0.95)
    logits = random_logits(4, 20_000, spread=0.1)  # flat: about 19,000 tokens are kept
    kept = restrict(logits, sampling) > 0
    expected = warped(logits.double(), sampling) > 0
    assert kept.sum() > 4 * 10_000
    # The token at the edge may fall either way by the rounding of 20,000 summands.
    assert (kept != expected).sum(-1).max() <= 1


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.6)])
def test_logprobs_are_of_the_distribution_drawn_from(sampling):
    logits = random_logits(256, 100)
    tokens, logprobs = draw(logits, sampling, numbers_for(256, 100))
    expected = warped(logits, sampling).gather(-1, tokens[:, None])[:, 0].log()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_greedy_takes_the_first_of_the_best():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    tokens, logprobs = draw(logits, Sampling(temperature=0), numbers_for(2, 3))
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0, 0]


def test_equals_at_the_edge_are_all_kept():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert (restrict(logits, Sampling(top_k=2)) > 0).tolist() == [[True, True, True, False]]
    assert (restrict(logits, Sampling(top_p=0.5)) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("sampling", [Sampling(top_p=1e-9), Sampling(top_k=1), Sampling(temperature=1e-4)])
def test_a_narrow_cut_is_greedy(sampling):
    logits = random_logits(64, 100)
    tokens, logprobs = draw(logits, sampling, numbers_for(64, 100))
    assert torch.equal(tokens, logits.argmax(-1))
    assert logprobs.abs().max() < 1e-6


def test_all_mass_in_one_token():
    logits = torch.full((200, 50), -torch.inf)
    logits[:, 17] = -1000.0
    tokens, logprobs = draw(logits, Sampling(), numbers_for(200, 50))
    assert tokens.unique().tolist() == [17]
    assert logprobs.unique().tolist() == [0]


def test_tokens_without_mass_are_never_drawn():
    logits = torch.zeros(5000, 99)
    logits[:, ::2] = -torch.inf
    tokens, _ = draw(logits, Sampling(), numbers_for(5000, 99))
    assert (tokens % 2 == 1).all()


def test_extreme_numbers_stay_inside():
    logits = torch.zeros(2, 5)
    least, most = torch.zeros(1, 3), torch.full((1, 3), 1 - 2.0**-53, dtype=torch.float64)
    tokens, _ = draw(logits, Sampling(), torch.cat([least.double(), most]))
    assert ((tokens >= 0) & (tokens < 5)).all()
    logits[:, 1:] = -torch.inf
    assert draw(logits, Sampling(), torch.cat([least.double(), most]))[0].tolist() == [0, 0]


def test_rounding_of_logits_hardly_ever_changes_a_draw():
    count, vocab_size = 1000, 49_152
    generator = torch.Generator().manual_seed(1)
    changed = 0
    for seed in range(4):
        logits = random_logits(count // 4, vocab_size, seed)
        noise = 1e-5 * torch.randn(logits.shape, generator=generator)
        numbers = numbers_for(count // 4, vocab_size, seed)
        before, after = draw(logits, Sampling(), numbers)[0], draw(logits + noise, Sampling(), numbers)[0]
        changed += int((before != after).sum())
    # 16 turns, each moved by about 1e-5 / 4 near the leaves: 0.04 changes expected. Inverting
    # the cumulative distribution with one number changes 5 of these 1000 draws.
    assert changed == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(value, temperature):
    logits = torch.zeros(3, 10)
    logits[1, 4] = value
    with pytest.raises(ModelError, match="1 of 3 sequences are not finite"):
        draw(logits, Sampling(temperature=temperature), numbers_for(3, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_takes_any_float_dtype_and_changes_nothing(dtype):
    logits = random_logits(4, 30).to(dtype)
    before = logits.clone()
    _, logprobs = draw(logits, Sampling(temperature=0.5, top_k=5), numbers_for(4, 30))
    assert torch.equal(logits, before)
    assert logprobs.dtype == torch.float32
