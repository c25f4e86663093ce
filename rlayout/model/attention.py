"""Attention of packed sequences: each token to those before it in its own sequence.

Sequences of one length are computed together, as batched matrix products: the query heads that share a
key-value head are rows of one matrix, so keys and values are never repeated. Sequences of a reinforcement
learning step are short, and so this beats the blocked kernels made for long ones (on CPU by a factor of
three, forward and backward). Long ones are cut into blocks of queries, which bounds the memory of the scores
and skips the keys that causality or a window hides.
"""

# autograd.Function types its methods for one signature only.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlayout.model.softmax import causal_softmax, causal_softmax_backward
from rlayout.spec.model_shape import ModelShape

QUERY_BLOCK = 128
"""Queries per block. Smaller skips more hidden keys, larger makes fewer and better matrix products."""
SAVED_KEYS = 512
"""Attention probabilities of up to so many keys are kept for the backward pass; beyond that they would
outgrow all other activations and are computed again."""


class PackedAttention:
    """Causal attention within each of the packed sequences, limited to the layer's window where it has one."""

    def __init__(self, lengths: Tensor, shape: ModelShape) -> None:
        """``lengths``: tokens of each sequence [B], int64."""
        self._shape = shape
        self._runs = [_Run(length, len(list(same))) for length, same in groupby(lengths.tolist()) if length]

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Attention output [T, H, d] of rotated queries and keys."""
        window = self._shape.window(layer)
        tokens = [run.length * run.num for run in self._runs]
        parts = zip(self._runs, *(x.split(tokens) for x in (q_THd, k_TKd, v_TKd)), strict=True)
        outputs = [_Attend.apply(q, k, v, run, window) for run, q, k, v in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # pyright: ignore


@dataclass(frozen=True)
class _Run:
    """``num`` sequences of ``length`` tokens, one after the other."""

    length: int
    num: int


@dataclass(frozen=True)
class _Block:
    """Queries ``first`` to ``last`` of every sequence and the keys, from ``low`` to ``last``, that they see."""

    first: int
    last: int
    low: int

    @property
    def offset(self) -> int:
        """Which of the block's keys is the first query's own."""
        return self.first - self.low


def _blocks(length: int, window: int | None) -> Iterator[_Block]:
    num = -(-length // QUERY_BLOCK)
    for i in range(num):
        first, last = length * i // num, length * (i + 1) // num
        yield _Block(first, last, 0 if window is None else max(0, first - window + 1))


class _Attend(torch.autograd.Function):
    """Attention of one run. Names: N sequences x key-value heads, R queries x query heads of one kv head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: _Run, window: int | None) -> Tensor:
        q_NRd, k_NLd, v_NLd = _queries(q, run, k.shape[1]), _keys(k, run), _keys(v, run)
        group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        out_NRd = torch.empty_like(q_NRd)
        kept = []
        for block in _blocks(run.length, window):
            rows = slice(block.first * group, block.last * group)
            keys = slice(block.low, block.last)
            probs = torch.bmm(q_NRd[:, rows], k_NLd[:, keys].mT)
            probs = causal_softmax(probs, group, block.offset, window, scale)
            out_NRd[:, rows] = torch.bmm(probs, v_NLd[:, keys])
            kept.append(probs if probs.shape[-1] <= SAVED_KEYS else None)
        ctx.save_for_backward(q_NRd, k_NLd, v_NLd, *kept)
        ctx.run, ctx.window, ctx.group = run, window, group
        return _tokens(out_NRd, run, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_NRd, k_NLd, v_NLd, *kept = ctx.saved_tensors
        run, window, group = ctx.run, ctx.window, ctx.group
        scale = q_NRd.shape[2] ** -0.5
        grad_NRd = _queries(grads[0], run, grads[0].shape[1] // group)
        grad_q, grad_k, grad_v = torch.empty_like(q_NRd), torch.zeros_like(k_NLd), torch.zeros_like(v_NLd)
        for block, saved in zip(_blocks(run.length, window), kept, strict=True):
            rows = slice(block.first * group, block.last * group)
            keys = slice(block.low, block.last)
            probs = saved
            if probs is None:
                probs = torch.bmm(q_NRd[:, rows], k_NLd[:, keys].mT)
                probs = causal_softmax(probs, group, block.offset, window, scale)
            grad_v[:, keys] += torch.bmm(probs.mT, grad_NRd[:, rows])
            grad_scores = torch.bmm(grad_NRd[:, rows], v_NLd[:, keys].mT)
            grad_scores = causal_softmax_backward(probs, grad_scores, group, block.offset, window, scale)
            grad_q[:, rows] = torch.bmm(grad_scores, k_NLd[:, keys])
            grad_k[:, keys] += torch.bmm(grad_scores.mT, q_NRd[:, rows])
        return _tokens(grad_q, run, group), _tokens(grad_k, run, 1), _tokens(grad_v, run, 1), None, None


def _queries(x_THd: Tensor, run: _Run, num_kv_heads: int) -> Tensor:
    """[T, H, d] to [sequences x kv heads, length x query heads of a kv head, d]."""
    grouped = x_THd.reshape(run.num, run.length, num_kv_heads, -1, x_THd.shape[-1])
    return grouped.transpose(1, 2).reshape(run.num * num_kv_heads, -1, x_THd.shape[-1])


def _keys(x_TKd: Tensor, run: _Run) -> Tensor:
    """[T, K, d] to [sequences x kv heads, length, d]."""
    return _queries(x_TKd, run, x_TKd.shape[1])


def _tokens(x_NRd: Tensor, run: _Run, group: int) -> Tensor:
    """The inverse of ``_queries``: [T, heads, d]."""
    split = x_NRd.view(run.num, -1, run.length, group, x_NRd.shape[-1])
    return split.transpose(1, 2).reshape(run.num * run.length, -1, x_NRd.shape[-1])
