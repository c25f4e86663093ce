"""Attention of packed sequences: each token to those before it in its own sequence.

A sequence may continue another one: then its tokens also see all tokens of that one, and the answers to a
prompt need the prompt only once. Sequences of one length are computed together, as batched matrix products:
the query heads that share a key-value head are rows of one matrix, so keys and values are never repeated.
Sequences of a reinforcement learning step are short, and so this beats the blocked kernels made for long
ones. Long ones are cut into blocks of queries, which bounds the memory of the scores and skips the keys that
causality or a window hides.

Names of dimensions: N sequences x key-value heads, R queries x query heads of one key-value head, M keys.
"""

from __future__ import annotations

# autograd.Function types its methods for one signature only.
# pyright: reportIncompatibleMethodOverride=false
from collections.abc import Iterator, Sequence
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

    def __init__(self, lengths: Tensor, shape: ModelShape, parents: Sequence[int] | None = None) -> None:
        """Plan for sequences that lie one after the other.

        Args:
            lengths: tokens of each sequence [B], int64.
            shape: of the model.
            parents: for each sequence the index of the one that it continues, which continues none itself;
                -1 for one that starts from nothing. None: all do. Neighbours with the same length and
                parent are computed together.
        """
        self._shape = shape
        self._runs = list(_runs(lengths.tolist(), parents or [-1] * len(lengths)))

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Attention output [T, H, d] of rotated queries and keys."""
        return _Attend.apply(q_THd, k_TKd, v_TKd, self._runs, self._shape.window(layer))  # pyright: ignore


@dataclass(frozen=True)
class _Run:
    """``num`` neighbouring sequences of ``length`` tokens that continue the same tokens."""

    tokens: slice
    length: int
    num: int
    before: slice
    """The tokens that they continue; empty where there are none."""

    @property
    def num_before(self) -> int:
        return self.before.stop - self.before.start

    def own(self, x_THd: Tensor) -> Tensor:
        """The run's part of the packed values, as [num, length, heads, d]."""
        return x_THd[self.tokens].unflatten(0, (self.num, self.length))


def _runs(lengths: list[int], parents: Sequence[int]) -> Iterator[_Run]:
    places, end = [], 0
    for length in lengths:
        places.append(slice(end, end + length))
        end += length
    start = 0
    for (length, parent), same in groupby(zip(lengths, parents, strict=True)):
        num = len(list(same))
        tokens = slice(start, start + num * length)
        start = tokens.stop
        if length:
            yield _Run(tokens, length, num, places[parent] if parent >= 0 else slice(0, 0))


@dataclass(frozen=True)
class _Block:
    """Some queries of every sequence of a run, as rows of the score matrix, and the keys that they see."""

    rows: slice
    keys: slice
    offset: int
    """Which of these keys is the first query's own."""


def _blocks(run: _Run, group: int, window: int | None) -> Iterator[_Block]:
    num = -(-run.length // QUERY_BLOCK)
    for i in range(num):
        first, last = run.length * i // num, run.length * (i + 1) // num
        own = run.num_before + first
        low = 0 if window is None else max(0, own - window + 1)
        yield _Block(slice(first * group, last * group), slice(low, run.num_before + last), own - low)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runs: list[_Run], window: int | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        kept: list[Tensor | None] = []
        for run in runs:
            q_NRd, k_NMd, v_NMd = _queries(q, run, group), _keys(k, run), _keys(v, run)
            out_NRd = torch.empty_like(q_NRd)
            for block in _blocks(run, group, window):
                probs = _probabilities(q_NRd, k_NMd, block, group, window)
                out_NRd[:, block.rows] = torch.bmm(probs, v_NMd[:, block.keys])
                kept.append(probs if probs.shape[-1] <= SAVED_KEYS else None)
            run.own(out).copy_(_heads(out_NRd, run, group))
        ctx.save_for_backward(q, k, v, *kept)
        ctx.runs, ctx.window = runs, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, *kept = ctx.saved_tensors
        saved = iter(kept)
        group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for run in ctx.runs:
            q_NRd, k_NMd, v_NMd = _queries(q, run, group), _keys(k, run), _keys(v, run)
            grad_NRd = _queries(grads[0], run, group)
            dq, dk, dv = torch.empty_like(q_NRd), torch.zeros_like(k_NMd), torch.zeros_like(v_NMd)
            for block in _blocks(run, group, ctx.window):
                probs = next(saved)
                if probs is None:
                    probs = _probabilities(q_NRd, k_NMd, block, group, ctx.window)
                grad_rows, keys = grad_NRd[:, block.rows], block.keys
                dv[:, keys] += torch.bmm(probs.mT, grad_rows)
                dscores = torch.bmm(grad_rows, v_NMd[:, keys].mT)
                dscores = causal_softmax_backward(probs, dscores, group, block.offset, ctx.window, scale)
                dq[:, block.rows] = torch.bmm(dscores, k_NMd[:, keys])
                dk[:, keys] += torch.bmm(dscores.mT, q_NRd[:, block.rows])
            run.own(grad_q).copy_(_heads(dq, run, group))
            _add_keys(grad_k, dk, run)
            _add_keys(grad_v, dv, run)
        return grad_q, grad_k, grad_v, None, None


def _probabilities(q_NRd: Tensor, k_NMd: Tensor, block: _Block, group: int, window: int | None) -> Tensor:
    scores = torch.bmm(q_NRd[:, block.rows], k_NMd[:, block.keys].mT)
    return causal_softmax(scores, group, block.offset, window, q_NRd.shape[2] ** -0.5)


def _queries(x_THd: Tensor, run: _Run, group: int) -> Tensor:
    """The run's queries, or anything of that shape: [T, H, d] to [N, R, d]."""
    grouped = run.own(x_THd).unflatten(2, (-1, group))
    return grouped.transpose(1, 2).reshape(-1, run.length * group, x_THd.shape[2])


def _heads(x_NRd: Tensor, run: _Run, group: int) -> Tensor:
    """The inverse of ``_queries``, [num, length, H, d]."""
    grouped = x_NRd.view(run.num, -1, run.length, group, x_NRd.shape[2])
    return grouped.transpose(1, 2).flatten(2, 3)


def _keys(x_TKd: Tensor, run: _Run) -> Tensor:
    """The keys or values that the run sees: [T, K, d] to [N, M, d]."""
    seen = run.own(x_TKd)
    if run.num_before:
        seen = torch.cat([x_TKd[run.before].expand(run.num, -1, -1, -1), seen], dim=1)
    return seen.transpose(1, 2).reshape(-1, run.num_before + run.length, x_TKd.shape[2])


def _add_keys(total_TKd: Tensor, x_NMd: Tensor, run: _Run) -> None:
    """Add gradients of ``_keys``' result to those of all keys."""
    seen = x_NMd.unflatten(0, (run.num, -1)).transpose(1, 2)
    if run.num_before:
        total_TKd[run.before] += seen[:, : run.num_before].sum(0)
    run.own(total_TKd).add_(seen[:, run.num_before :])
