"""The transformer's pointwise functions and matrix products, with gradients that cost few passes over memory.

In bfloat16 and float32 on CPU they run in ``native.c``; elsewhere they are PyTorch's own. Both compute in
float32 inside.
Shapes: T rows (tokens), D size of a row, I inputs and O outputs of a matrix.
"""

# autograd.Function types its methods for one signature only.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlayout.model import native

GRADIENT_SINK = "_gradient_sink"
"""Name of a parameter's attribute, see ``gradient_sink``."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean of x^2 over the last dimension + eps) * weight; ``x`` [..., D], ``weight`` [D]."""
    if native.usable(x, weight):
        return _apply(_RmsNorm, x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; all of one shape."""
    if native.usable(gate, up):
        return _apply(_Swiglu, gate, up)
    return F.silu(gate) * up


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Return x * cos + (x with its halves exchanged) * sin.

    ``sin_T1d`` is negated in its first half, as rope.Rotation has it; the gradient relies on that.
    """
    if native.usable(x_THd, cos_T1d, sin_T1d):
        return _apply(_Rotate, x_THd, cos_T1d, sin_T1d)
    # Three operations where the textbook form takes seven: decoding is bound by their number.
    return torch.addcmul(x_THd * cos_T1d, x_THd.roll(x_THd.shape[-1] // 2, -1), sin_T1d)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias; ``x`` [..., I], ``weight`` [O, I]."""
    if torch.is_grad_enabled() and weight.requires_grad and x.dim() == 2 and native.usable(x, weight):
        product = _apply(_Linear, x, weight)
        return product if bias is None else product + bias
    return F.linear(x, weight, bias)


def embedding(tokens_T: Tensor, weight: Tensor) -> Tensor:
    """The rows of ``weight`` [V, D] that ``tokens_T`` names [T, D]."""
    if torch.is_grad_enabled() and weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float32):
        return _apply(_Embedding, tokens_T, weight)
    return F.embedding(tokens_T, weight)


def add_matrix_gradient(weight: Tensor, grad: Tensor, x: Tensor, rows: slice = slice(None)) -> Tensor | None:
    """Add grad^T x to rows of the sink of ``weight`` (see gradients.py), or return it where there is none."""
    sink = gradient_sink(weight)
    if sink is None:
        return matrix_gradient(grad, x)
    if sink.dtype == x.dtype:
        sink[rows].addmm_(grad.t(), x)
    else:
        add_to(sink[rows], matrix_gradient(grad, x))
    return None


def gradient_sink(weight: Tensor) -> Tensor | None:
    """Where the gradient of ``weight`` is summed at this time, if it is; of its shape, usually in float32."""
    return getattr(weight, GRADIENT_SINK, None)


def matrix_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad^T x [O, I] of ``grad`` [T, O] and ``x`` [T, I].

    oneDNN's bfloat16 product reads a transposed first factor at a third of the speed (0.4 instead of 1.2
    TFLOP/s measured on one core with AMX), so the smaller factor is transposed first.
    """
    if grad.dtype != torch.bfloat16 or not native.usable(grad, x):
        return grad.t() @ x
    if grad.shape[1] <= x.shape[1]:
        return transposed(grad) @ x
    return transposed(transposed(x) @ grad)


def transposed(x: Tensor) -> Tensor:
    """A contiguous transposed copy of a matrix."""
    if not native.usable(x):
        return x.t().contiguous()
    out = x.new_empty(x.shape[1], x.shape[0])
    native.call("transpose", x, out, *x.shape)
    return out


def add_to(total: Tensor, x: Tensor) -> None:
    """Add ``x`` to ``total``, of any dtypes and one shape."""
    if native.usable(x) and native.usable(total) and total.dtype == torch.float32:
        native.call("accumulate", x, total, x.numel())
    else:
        total += x


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    if not torch.is_grad_enabled():  # autograd's bookkeeping takes longer than the work of a decode step
        return function.forward(_NothingToKeep(), *arguments)
    return function.apply(*arguments)  # pyright: ignore[reportReturnType]


class _NothingToKeep:
    """Stands for autograd's context where no backward pass will come."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = len(weight)
        num = x.numel() // size
        y = torch.empty_like(x)
        scale = torch.empty(num, dtype=torch.float32)
        native.call("rms_norm", x, weight, y, scale, num, size, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32)
        native.call(
            "rms_norm_backward",
            *(x, weight, scale, grads[0].contiguous(), grad_x, grad_weight, len(scale), len(weight)),
        )
        sink = gradient_sink(weight)
        if sink is None:
            return grad_x, grad_weight.to(weight.dtype), None
        add_to(sink, grad_weight)
        return grad_x, None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        y = torch.empty_like(gate)
        native.call("swiglu", gate, up, y, gate.numel())
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        native.call("swiglu_backward", gate, up, grads[0].contiguous(), grad_gate, grad_up, gate.numel())
        return grad_gate, grad_up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The transpose of a rotation turns the other way.
        return _rotated(grads[0].contiguous(), *ctx.saved_tensors, sign=-1.0), None, None


def _rotated(x_THd: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    y = torch.empty_like(x_THd)
    native.call("rotate", x_THd, cos, sin, y, *x_THd.shape, sign)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, add_matrix_gradient(weight, grad, x)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Frequent tokens sum hundreds of gradients: in bfloat16 the small ones would be lost, and on CPU
        # index_add is an order of magnitude faster in float32.
        tokens, weight = ctx.saved_tensors
        words, place = tokens.unique(return_inverse=True)
        summed = torch.zeros(len(words), grads[0].shape[1], dtype=torch.float32, device=tokens.device)
        summed.index_add_(0, place, grads[0].float())
        sink = gradient_sink(weight)
        if sink is not None:
            sink.index_add_(0, words, summed.to(sink.dtype))
            return None, None
        return None, torch.zeros_like(weight).index_copy_(0, words, summed.to(weight.dtype))
