"""However a mini-batch is divided over micro-batches and ranks, it has one loss, gradient and figures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlayout.algorithms.grpo import GrpoLoss
from rlayout.algorithms.sft import SftLoss
from rlayout.data.objective import Loss
from tests.algorithms.cases import combine, evaluate, random_batch, totals_of

LOSSES: list[Loss] = [
    GrpoLoss("sampled_logprobs", 0.2, 0.28, 0.04, "token_mean"),
    GrpoLoss("sampled_logprobs", 0.2, 0.28, 0.04, "sequence_mean"),
    SftLoss("token_mean"),
    SftLoss("sequence_mean"),
]

# float64; sums of at most 200 terms of size about 1
CLOSE = {"rel_tol": 1e-11, "abs_tol": 1e-11}


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[int], list[list[list[int]]]]:
    """Row lengths, and for each rank the micro-batches of row indices that it computes, in any order."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    order = draw(st.permutations(range(len(lengths))))
    num_ranks = draw(st.integers(1, 4))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    while order:
        size = draw(st.integers(1, len(order)))
        ranks[draw(st.integers(0, num_ranks - 1))].append(list(order[:size]))
        order = order[size:]
    return lengths, ranks


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=60, deadline=None)
@given(division=divisions(), seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_division_does_not_matter(loss: Loss, division, seed: int, share: float):
    lengths, ranks = division
    batch = random_batch(lengths, seed=seed, share_masked=share)
    totals = totals_of(batch)
    value, gradient, figures = evaluate(loss, [batch], totals)

    divided_value, divided_gradient, divided_figures = 0.0, {}, {}
    for micro_batches in ranks:
        if micro_batches:
            part = evaluate(loss, [batch.select(rows) for rows in micro_batches], totals)
            divided_value += part[0]
            divided_gradient |= part[1]
            divided_figures = combine(divided_figures, part[2])

    assert math.isclose(divided_value, value, **CLOSE)
    assert divided_gradient.keys() == gradient.keys()
    for place, grad in gradient.items():
        assert math.isclose(divided_gradient[place], grad, **CLOSE)
    for name, figure in figures.items():
        assert math.isclose(divided_figures[name].figure, figure.figure, **CLOSE), name
        assert divided_figures[name].weight == figure.weight or figure.kind == "max"


@pytest.mark.parametrize("loss", LOSSES)
def test_dividing_by_the_micro_batch_instead_would_be_noticed(loss: Loss):
    """The test above can fail: local totals give another loss."""
    batch = random_batch([5, 1, 7], seed=2, share_masked=0.8)
    parts = [batch.select([0]), batch.select([1, 2])]
    whole = evaluate(loss, [batch], totals_of(batch))[0]
    local = sum(evaluate(loss, [part], totals_of(part))[0] for part in parts)
    assert not math.isclose(local, whole, rel_tol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_float32_agrees_with_float64(loss: Loss):
    exact = random_batch([20, 30, 1], seed=4)
    single = random_batch([20, 30, 1], seed=4)
    single = single.with_values(
        tokens={k: v.to(torch.float32) if v.is_floating_point() else v for k, v in exact.tokens.items()}
    )
    value, expected = (evaluate(loss, [b], totals_of(b))[0] for b in (single, exact))
    # 51 terms of size about 1: well within 1e-5 in float32
    assert math.isclose(value, expected, rel_tol=1e-5, abs_tol=1e-6)
