import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlayout.algorithms.kl import k1, k2, k3


def test_by_hand():
    p = torch.tensor([0.5, 0.2], dtype=torch.float64)
    q = torch.tensor([0.25, 0.4], dtype=torch.float64)
    ratio = q / p
    torch.testing.assert_close(k1(p.log(), q.log()), -ratio.log())
    torch.testing.assert_close(k2(p.log(), q.log()), ratio.log() ** 2 / 2)
    torch.testing.assert_close(k3(p.log(), q.log()), ratio - 1 - ratio.log())


@given(st.integers(0, 10_000), st.integers(2, 12))
def test_k1_and_k3_are_unbiased(seed: int, size: int):
    """Their expectation over p, taken exactly, is KL(p || q)."""
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_p, log_q = logits.log_softmax(-1)
    exact = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    for estimator in (k1, k3):
        torch.testing.assert_close((log_p.exp() * estimator(log_p, log_q)).sum(), exact)


@given(st.floats(-20, 5), st.floats(-20, 5))
def test_k2_and_k3_are_never_negative(p: float, q: float):
    log_p, log_q = torch.tensor([p]), torch.tensor([q])
    assert k2(log_p, log_q) >= 0
    assert k3(log_p, log_q) >= 0


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    difference = 1e-3
    found = k3(torch.tensor([0.0]), torch.tensor([difference])).item()
    # In float32 exp(x) - x - 1 is off by tens of percent here: its rounding is 6e-8, the value 5e-7.
    assert found == pytest.approx(difference**2 / 2, rel=1e-3)
