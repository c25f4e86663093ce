"""The C functions against PyTorch in float64: outputs of bfloat16 may differ by one rounding (2^-8)."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rlayout.model import native
from rlayout.model.adamw import adamw, square_sum
from rlayout.model.functional import (
    add_to,
    embedding,
    linear,
    matrix_gradient,
    rms_norm,
    rotate,
    swiglu,
    transposed,
)
from rlayout.model.head import RunningSoftmax, logit_gradient
from rlayout.model.rope import rotation
from rlayout.model.softmax import causal_softmax, causal_softmax_backward
from rlayout.spec.optimization import Optimization

needs_compiler = pytest.mark.skipif(not native.available(), reason="no C compiler")
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, rtol: float = 2**-7, atol: float = 2**-9) -> None:
    """``found`` in its own precision; the bounds are for bfloat16, float32 must be 1,000 times closer."""
    if found.dtype == torch.float32:
        rtol, atol = rtol / 1000, atol / 1000
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=atol)


def test_python_and_c_agree_on_every_signature() -> None:
    source = Path(native.__file__).with_name("native.c").read_text()
    kinds = {}
    for name, arguments in re.findall(r"\nvoid (\w+)\(([^)]*)\)", source):
        kinds[name] = "".join("p" if "*" in a else "l" if "long" in a else "f" for a in arguments.split(","))
    assert kinds == native._ARGUMENTS


def test_without_a_compiler_pytorch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = values(5, 8), values(5, 8, seed=1)
    monkeypatch.setattr(native, "available", lambda: False)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up, rtol=0, atol=0)


def test_missing_compiler_is_found_out_once_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native._library.__wrapped__(torch.bfloat16) is None
    assert "slower" in caplog.text


def test_broken_compiler_is_not_fatal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._library.__wrapped__(torch.bfloat16) is None
    assert "cannot be built" in caplog.text


@needs_compiler
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 128), (300, 257), (7, 1000), (0, 4)])
@each_dtype
def test_transposed(rows: int, cols: int, dtype: torch.dtype) -> None:
    x = values(rows, cols, dtype=dtype)
    assert torch.equal(transposed(x), x.t())


@needs_compiler
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (40, 24), (32, 32)])
def test_matrix_gradient(outputs: int, inputs: int) -> None:
    grad, x = values(50, outputs), values(50, inputs, seed=1)
    torch.testing.assert_close(
        matrix_gradient(grad, x).float(), grad.float().t() @ x.float(), rtol=2**-7, atol=0.05
    )


@needs_compiler
def test_add_to() -> None:
    total, x = torch.full((3, 70), 1e-3), values(3, 70)
    expected = total + x.float()
    add_to(total, x)
    assert torch.equal(total, expected)


@needs_compiler
@each_dtype
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rotate", "linear", "embedding"])
def test_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    """Against the same function of float64, where PyTorch computes it and its gradient."""
    turn = rotation(torch.arange(37), torch.tensor([1.0, 0.3, 0.1, 0.03]), 1.0, dtype)
    tokens = torch.randint(11, (37,), generator=torch.Generator().manual_seed(0))
    functions = {
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), (values(37, 48), values(48, seed=1))),
        "swiglu": (swiglu, (3 * values(37, 48), values(37, 48, seed=1))),
        "rotate": (lambda x: rotate(x, *(t.to(x.dtype) for t in turn)), (values(37, 3, 8),)),
        "linear": (linear, (values(37, 48), values(20, 48, seed=1))),
        "embedding": (lambda w: embedding(tokens, w), (values(11, 16),)),
    }
    function, arguments = functions[name]
    narrow = [a.to(dtype, copy=True).requires_grad_() for a in arguments]
    wide = [a.double().requires_grad_() for a in arguments]
    found, expected = function(*narrow), function(*wide)
    assert found.dtype == dtype
    assert_close(found, expected, atol=2**-6)
    grad = values(*expected.shape, seed=2, dtype=dtype)
    found.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        # A sum over 37 rows of values near 1: its bfloat16 rounding is up to 2^-8 of about 16.
        assert_close(ours.grad, theirs.grad, atol=2**-5)


@needs_compiler
@each_dtype
@pytest.mark.parametrize(("group", "offset", "window"), [(1, 0, None), (3, 0, None), (3, 5, 4), (2, 3, 1)])
def test_softmax(group: int, offset: int, window: int | None, dtype: torch.dtype) -> None:
    shape = (2, 9 * group, 9 + offset)
    scores, grad = values(*shape, dtype=dtype), values(*shape, seed=1, dtype=dtype)
    expected = causal_softmax(scores.double(), group, offset, window, 0.7)
    expected_grad = causal_softmax_backward(expected, grad.double(), group, offset, window, 0.7)
    probs = causal_softmax(scores.clone(), group, offset, window, 0.7)
    assert_close(probs, expected)
    found = causal_softmax_backward(probs, grad.clone(), group, offset, window, 0.7)
    assert_close(found, expected_grad, rtol=2**-6, atol=2**-7)


@needs_compiler
@each_dtype
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_head(temperature: float, dtype: torch.dtype) -> None:
    parts = (4 * values(6, 50, dtype=dtype)).split(17, dim=1)
    sums = RunningSoftmax.start(torch.empty(6))
    expected = RunningSoftmax.start(torch.empty(6, dtype=torch.float64))
    for part in parts:
        sums.add(part.contiguous(), temperature)
        expected.add(part.double(), temperature)
    assert_close(sums.normaliser(), expected.normaliser())
    assert_close(sums.entropy(), expected.entropy())
    scale, targets = values(6, seed=3).float(), torch.tensor([0, 16, 17, -1, 40, 3])
    found = logit_gradient(parts[0].contiguous(), sums.normaliser(), scale, targets, temperature)
    arguments = (expected.normaliser(), scale.double(), targets, temperature)
    assert_close(found, logit_gradient(parts[0].double(), *arguments))


@needs_compiler
def test_not_a_number_stays_visible() -> None:
    bad = values(4, 64)
    bad[1, 5] = torch.nan
    assert swiglu(bad, values(4, 64))[1, 5].isnan()
    assert rms_norm(bad, values(64), 1e-5)[1].isnan().all()
    assert causal_softmax(bad[None].clone(), 1, 60, None, 1.0)[0, 1].isnan().any()
    sums = RunningSoftmax.start(torch.empty(4))
    sums.add(bad, 1.0)
    assert sums.normaliser().isnan().tolist() == [False, True, False, False]


@needs_compiler
def test_exponential_is_accurate_to_float32() -> None:
    # exp(x) of a row [x, 0] is total - 1 when 0 is the largest.
    x = -torch.arange(0, 86, 0.5).bfloat16()
    sums = RunningSoftmax.start(torch.empty(len(x)))
    sums.add(x[:, None].contiguous(), 1.0)
    torch.testing.assert_close(sums.top, x.float())
    zeros = torch.zeros(len(x), 1, dtype=torch.bfloat16)
    sums.add(zeros, 1.0)
    torch.testing.assert_close(sums.total, 1 + x.double().exp().float(), rtol=2e-7, atol=0)
    torch.testing.assert_close(sums.weighted, (x.double() * x.double().exp()).float(), rtol=5e-7, atol=1e-36)


@needs_compiler
def test_adamw_and_square_sum_equal_their_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.rand(1000, generator=generator) for _ in range(4)]
    found = [x.clone() for x in start]

    def update(x: list[torch.Tensor]) -> None:
        adamw((x[0], x[1], x[2]), x[3], Optimization(), rate=0.01, clip=0.3, decay=0.1, num_updates=3)

    update(found)
    square = square_sum(start[3])
    monkeypatch.setattr(native, "available", lambda: False)
    expected = [x.clone() for x in start]
    update(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(square, square_sum(start[3]), rtol=1e-12, atol=0)
