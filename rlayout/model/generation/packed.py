"""A model whose matrices are laid out once for many small products: decoding on CPU.

A decode step multiplies each matrix with a few dozen rows. oneDNN reorders a plain matrix at every such
product; here it is reordered once, for all steps of a generate call, and the feed-forward's SiLU and
product run inside its matrix products. The copy takes the memory of the weights until it is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlayout.model.transformer import FeedForward, Linear, Transformer

Head = Callable[[Tensor], Tensor]
"""Hidden states [T, D] to logits [T, V]."""


def can_pack(model: Transformer) -> bool:
    """Whether this machine has faster matrices for the model: bfloat16 on a CPU that multiplies it.

    In float32 the copy is twice as large, and no more than a quarter faster than PyTorch's plain product.
    """
    weight = model.head_weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def for_decoding(model: Transformer, num_rows: int) -> tuple[Transformer, Head]:
    """The model and its head for decode steps of about ``num_rows`` sequences, packed where that helps.

    Both compute what ``model`` computes, up to rounding. Tensors other than matrices are shared.
    """
    if not can_pack(model):
        weight = model.head_weight
        return model, lambda hidden: F.linear(hidden, weight)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    packed = copy.deepcopy(model, shared)
    _replace(packed, num_rows)
    head = _PackedMatrix(model.head_weight, None, num_rows)
    return packed, head.apply


def _replace(module: nn.Module, num_rows: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, FeedForward):
            setattr(module, name, _PackedFeedForward(child, num_rows))
        elif isinstance(child, Linear):
            setattr(module, name, _PackedLinear(child, num_rows))
        else:
            _replace(child, num_rows)


class _PackedMatrix:
    """A matrix [outputs, inputs] in oneDNN's own layout for products with ``num_rows`` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, num_rows: int) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), num_rows)
        self.bias = None if bias is None else bias.detach()

    def apply(self, x: Tensor, then: str = "none") -> Tensor:
        """``then(x @ weight.T + bias)``, ``then`` being "none" or "swish" (SiLU)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """``(x @ weight.T + bias) * factor``."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")


class _PackedLinear(nn.Module):
    def __init__(self, linear: Linear, num_rows: int) -> None:
        super().__init__()
        self._matrix = _PackedMatrix(linear.weight, linear.bias, num_rows)

    def forward(self, x: Tensor) -> Tensor:
        return self._matrix.apply(x)


class _PackedFeedForward(nn.Module):
    def __init__(self, mlp: FeedForward, num_rows: int) -> None:
        super().__init__()
        self._gate, self._up, self._down = (
            _PackedMatrix(linear.weight, linear.bias, num_rows) for linear in (mlp.gate, mlp.up, mlp.down)
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        return self._down.apply(self._up.times(x_TD, self._gate.apply(x_TD, "swish")))
