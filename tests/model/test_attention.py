"""Packed attention against a plain masked softmax over all tokens of all sequences at once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlayout.model import attention
from rlayout.model.attention import PackedAttention
from rlayout.spec.model_shape import ModelShape
from tests.model.tiny import SHAPE

LENGTHS = {
    "equal": [5, 5, 5],
    "mixed": [3, 3, 1, 9, 40, 40, 2],
    "single tokens": [1, 1, 1],
    "one": [17],
}


def plain_attention(
    lengths: list[int], window: int | None, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor
) -> Tensor:
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(row))
    behind = place[:, None] - place[None, :]
    seen = (row[:, None] == row[None, :]) & (behind >= 0)
    if window is not None:
        seen &= behind < window
    group = q_THd.shape[1] // k_TKd.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_TKd, v_TKd))
    scores = torch.einsum("qhd,khd->hqk", q_THd, k) * q_THd.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def tensors(num_tokens: int, shape: ModelShape, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    drawn = [
        torch.randn(num_tokens, n, shape.head_dim, generator=generator, dtype=torch.float64) for n in heads
    ]
    return [x.to(dtype).requires_grad_() for x in drawn]


def compare(lengths: list[int], shape: ModelShape, dtype: torch.dtype, *, rtol: float, atol: float) -> None:
    ours, theirs = tensors(sum(lengths), shape, dtype), tensors(sum(lengths), shape, torch.float64)
    found = PackedAttention(torch.tensor(lengths), shape)(0, ours[0], ours[1], ours[2])
    expected = plain_attention(lengths, shape.window(0), theirs[0], theirs[1], theirs[2])
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )
    found.backward(grad)
    expected.backward(grad.double())
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_equals_plain_attention(lengths: list[int], num_kv_heads: int, window: int | None) -> None:
    shape = replace(
        SHAPE, num_kv_heads=num_kv_heads, sliding_window=window, sliding_layers=(0,) if window else ()
    )
    compare(lengths, shape, torch.float64, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [None, 6])
def test_blocks_of_queries_change_nothing(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", 7)
    monkeypatch.setattr(attention, "SAVED_KEYS", 10)
    shape = replace(SHAPE, sliding_window=window, sliding_layers=(0,) if window else ())
    compare([33, 33, 8], shape, torch.float64, rtol=1e-10, atol=1e-12)


def test_window_only_in_its_layers() -> None:
    shape = replace(SHAPE, sliding_window=2, sliding_layers=(1,))
    q, k, v = tensors(9, shape, torch.float64)
    packed = PackedAttention(torch.tensor([9]), shape)
    torch.testing.assert_close(packed(0, q, k, v), plain_attention([9], None, q, k, v))
    torch.testing.assert_close(packed(1, q, k, v), plain_attention([9], 2, q, k, v))


def test_bfloat16() -> None:
    # Scores, probabilities and outputs are rounded to 8 bits: a few 2^-8 of values up to 4.
    compare([40, 40, 3], replace(SHAPE, head_dim=16), torch.bfloat16, rtol=2**-5, atol=2**-4)
