"""Scoring against plain logits and plain autograd."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from rlayout.data.batch import Batch
from rlayout.errors import DataError
from rlayout.model import head
from rlayout.model.attention import PackedAttention
from rlayout.model.head import head_scores
from rlayout.model.scoring import infer, positions, score
from rlayout.model.transformer import Transformer
from rlayout.spec.sampling import Sampling
from tests.model.tiny import random_batch, tiny_model

LENGTHS = [3, 50, 7, 7, 1, 20]


def plain_scores(model: Transformer, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of every token given those before it [T] and entropy [T]; first tokens get 0."""
    found, spread = [], []
    for tokens in batch.per_row("tokens"):
        attention = PackedAttention(torch.tensor([len(tokens)]), model.shape)
        logits = model(tokens, torch.arange(len(tokens)), attention) @ model.head_weight.t()
        logs = (logits / temperature).log_softmax(-1)[:-1]
        zero = logs.new_zeros(1)
        found.append(torch.cat([zero, logs.gather(-1, tokens[1:, None])[:, 0]]))
        spread.append(torch.cat([zero, -(logs.exp() * logs).sum(-1)]))
    mask = batch.tokens["mask"]
    return torch.cat(found) * mask, torch.cat(spread) * mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("slice_elements", [1, 97, 1 << 23])
def test_equals_plain_autograd(
    temperature: float, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "SLICE_ELEMENTS", slice_elements)
    batch = random_batch(LENGTHS)
    ours, theirs = (tiny_model(dtype=torch.float64) for _ in range(2))
    scores = score(ours, batch, temperature=temperature, need_gradient=True)
    logprobs, entropy = plain_scores(theirs, batch, temperature)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-10, atol=1e-12)
    assert not scores.entropy.requires_grad
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (weights * scores.logprobs).sum().backward()
    (weights * logprobs).sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_gradient_equals_finite_differences() -> None:
    batch = random_batch([3, 9, 4])
    model = tiny_model(dtype=torch.float64)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(need_gradient: bool) -> Tensor:
        return (weights * score(model, batch, temperature=0.8, need_gradient=need_gradient).logprobs).sum()

    loss(True).backward()
    generator = torch.Generator().manual_seed(1)
    step = 1e-5
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        assert parameter.grad is not None
        slope = (parameter.grad * direction).sum()
        with torch.no_grad():
            parameter.add_(step * direction)
            up = loss(False)
            parameter.sub_(2 * step * direction)
            down = loss(False)
            parameter.add_(step * direction)
        torch.testing.assert_close((up - down) / (2 * step), slope, rtol=1e-6, atol=1e-7, msg=f"{name}")


def test_without_gradient_nothing_is_recorded() -> None:
    scores = score(tiny_model(), random_batch([4, 4]), need_gradient=False)
    assert not scores.logprobs.requires_grad


def test_nothing_under_the_mask() -> None:
    batch = random_batch([4, 4])
    batch = batch.with_values(tokens={"mask": torch.zeros(8, dtype=torch.bool)})
    scores = score(tiny_model(), batch, need_gradient=True)
    assert scores.logprobs.tolist() == [0.0] * 8


def test_refuses_a_mask_over_a_first_token() -> None:
    batch = random_batch([4, 4])
    batch.tokens["mask"][4] = True
    with pytest.raises(DataError, match="row 1: the mask covers the row's first token"):
        score(tiny_model(), batch, need_gradient=True)


def test_positions_start_anew_in_each_row() -> None:
    assert positions(random_batch([3, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 1000])
def test_infer_is_independent_of_micro_batches(micro_batch_tokens: int) -> None:
    batch, model = random_batch(LENGTHS), tiny_model(dtype=torch.float64)
    found = infer(model, batch, sampling=Sampling(temperature=0.7), micro_batch_tokens=micro_batch_tokens)
    assert found.dtype == torch.float32
    expected = plain_scores(model, batch, 0.7)[0]
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}])
def test_infer_under_top_k_and_top_p(cut: dict) -> None:
    batch, model = random_batch(LENGTHS), tiny_model()
    found = infer(model, batch, sampling=Sampling(temperature=0.7, **cut), micro_batch_tokens=60)
    full = infer(model, batch, sampling=Sampling(temperature=0.7), micro_batch_tokens=60)
    mask = batch.tokens["mask"]
    kept = mask & found.isfinite()
    assert 0 < int(kept.sum()) < int(mask.sum())
    # Renormalised: every token that is kept is more probable than without the cut.
    assert (found[kept] > full[kept]).all()
    assert (found[~mask] == 0).all()


def test_infer_refuses_greedy() -> None:
    with pytest.raises(DataError, match="temperature above 0"):
        infer(tiny_model(), random_batch([4]), sampling=Sampling(temperature=0.0), micro_batch_tokens=10)


def test_infer_of_no_rows() -> None:
    batch = random_batch([4]).select([])
    assert infer(tiny_model(), batch, sampling=Sampling(), micro_batch_tokens=10).shape == (0,)


MEMORY_PROBE = """
import resource, sys, torch
from rlayout.model.head import head_scores
torch.set_num_threads(1)
rows, words, size = 1500, 150_000, 8
hidden = torch.randn(rows, size, requires_grad=True)
weight = torch.randn(words, size, requires_grad=True)
targets = torch.randint(words, (rows,))
small, _ = head_scores(hidden[:10], weight, targets[:10])
small.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logprobs, _ = head_scores(hidden, weight, targets)
logprobs.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_a_large_vocabulary_does_not_fill_memory() -> None:
    """All logits of the probe would take 900 MB in float32; slices are 17 MB, and a few exist at once."""
    probe = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE], check=True, capture_output=True, text=True, timeout=120
    )
    assert int(probe.stdout) < 250e6


def test_head_in_bfloat16_is_near_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator) for n in (40, 500))
    targets = torch.randint(500, (40,), generator=generator)
    narrow = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    wide = [x.bfloat16().float().requires_grad_() for x in (hidden, weight)]
    found, expected = (head_scores(x[0], x[1], targets)[0] for x in (narrow, wide))
    # Logits of up to 30 are rounded to 2^-9 of themselves.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
    found.sum().backward()
    expected.sum().backward()
    for a, b in zip(narrow, wide, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad.float() - b.grad).norm() < 0.02 * b.grad.norm()
