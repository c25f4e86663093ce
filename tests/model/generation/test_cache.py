"""Decode attention: both ways against a loop over sequences in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rlayout.model import native
from rlayout.model.generation.cache import Cache, DecodeAttention
from tests.model.generation.test_engine import LLAMA

POSITIONS = (0, 5, 63, 64, 65, 150)


def exact(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention of the query at each position to its own slot, in float64 [B, H, d]."""
    outputs = []
    for slot, position in enumerate(POSITIONS):
        start = 0 if window is None else max(0, position + 1 - window)
        k, v = (x[slot, start : position + 1].double() for x in (keys, values))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("hd,lhd->hl", q[slot].double(), k) * q.shape[2] ** -0.5
        outputs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
    return torch.stack(outputs)


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 64), (7, 1, 32), (4, 4, 128), (10, 2, 96), (6, 2, 8)]
)
@pytest.mark.parametrize("way", ["float32", "bfloat16", "bfloat16 without compiler"])
def test_attention_to_the_cache(window, heads, kv_heads, size, way, monkeypatch):
    dtype = torch.float32 if way == "float32" else torch.bfloat16
    if way == "bfloat16 without compiler":
        monkeypatch.setattr(native, "available", lambda: False)
    shape = dataclasses.replace(
        LLAMA,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        sliding_window=window,
        sliding_layers=() if window is None else (1,),
    )
    generator = torch.Generator().manual_seed(0)
    cache = Cache(shape, num_slots=8, capacity=200, dtype=dtype, device=torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(2 * torch.randn(tensor.shape, generator=generator))  # what is not seen is not zero
    batch = len(POSITIONS)
    q = torch.randn(batch, heads, size, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, kv_heads, size, generator=generator).to(dtype)
    attention = DecodeAttention(cache, torch.tensor(POSITIONS))
    for layer in range(2):
        out = attention(layer, q, k, v)
        keys, values = cache.keys[layer], cache.values[layer]
        for slot, position in enumerate(POSITIONS):
            assert torch.equal(keys[slot, position], k[slot])
            assert torch.equal(values[slot, position], v[slot])
        expected = exact(q, keys, values, shape.window(layer))
        error = (out - expected).abs()
        if way == "float32":
            assert error.max() < 1e-5
            continue
        # Float32 inside, and a result rounded to 8 bits.
        bound = 2.0**-8 * expected.abs() + 1e-5
        if way != "bfloat16" or size == 8:
            # PyTorch rounds the probabilities to 8 bits, too.
            bound += 2.0**-8 * exact(q, keys, values.abs(), shape.window(layer))
        assert (error <= bound).all()


def test_the_kernel_is_used_where_a_compiler_exists(monkeypatch):
    if not native.available():
        pytest.skip("no C compiler")
    called: list[str] = []
    call = native.call
    monkeypatch.setattr(native, "call", lambda name, *rest: (called.append(name), call(name, *rest)))
    shape = dataclasses.replace(LLAMA, head_dim=64)
    cache = Cache(shape, num_slots=1, capacity=9, dtype=torch.bfloat16, device=torch.device("cpu"))
    q, k, v = (torch.zeros(1, heads, 64, dtype=torch.bfloat16) for heads in (6, 2, 2))
    DecodeAttention(cache, torch.tensor([4]))(0, q, k, v)
    assert called == ["decode_attention"]
