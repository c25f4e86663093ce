"""The decoder-only transformer of the Llama, Qwen2, Qwen3 and Mistral families.

Training, inference and generation run this same code on packed tokens; how tokens attend to each other is
passed in, so that a forward pass over whole sequences and a decoding step with a cache differ in nothing
else. Shapes in names: T packed tokens, D hidden, H query heads, K key-value heads, d head, F feed-forward,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from rlayout.model import functional
from rlayout.model.rope import Rotation, frequencies, rotate, rotation
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import parameters


class Attention(Protocol):
    """How the tokens of a forward pass attend to each other, and to a cache where there is one."""

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Attention output [T, H, d] of ``layer``; queries and keys are already rotated.

        Scores are scaled by ``head_dim ** -0.5`` and limited to the layer's window.
        """
        ...


Allocate = Callable[[str], nn.Parameter | None]
"""A new parameter by its name, or None where the table has none of that name."""


class Transformer(nn.Module):
    """A language model without its loss. Parameters are those of ``spec.parameters``, under the same names."""

    inverse_frequencies: Tensor

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Allocate the parameters, uninitialized: load them, or call ``init_weights``."""
        super().__init__()
        sizes = {parameter.name: parameter.shape for parameter in parameters(shape)}

        def allocate(name: str) -> nn.Parameter | None:
            if name not in sizes:
                return None
            return nn.Parameter(torch.empty(sizes[name], dtype=dtype, device=device))

        self.shape = shape
        self.embedding = Embedding(allocate, "embedding")
        self.layers = nn.ModuleList(Layer(allocate, f"layers.{i}", i, shape) for i in range(shape.num_layers))
        self.norm = Norm(allocate, "norm", shape.norm_eps)
        self.head = None if shape.tie_embeddings else Linear(allocate, "head")
        inverse_frequencies, self.rope_scale = frequencies(shape)
        self.register_buffer("inverse_frequencies", inverse_frequencies.to(device), persistent=False)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the last norm [T, D]; ``head_weight`` turns them into logits.

        Args:
            tokens_T: token ids of all sequences, one after the other [T], int64.
            positions_T: place of each token in its own sequence [T], int64.
            attention: how the tokens attend to each other.
        """
        x_TD = self.embedding(tokens_T)
        turn = rotation(positions_T, self.inverse_frequencies, self.rope_scale, x_TD.dtype)
        for layer in self.layers:
            x_TD = layer(x_TD, turn, attention)
        return self.norm(x_TD)

    @property
    def head_weight(self) -> Tensor:
        """The matrix from hidden states to logits [V, D]."""
        return self.embedding.weight if self.head is None else self.head.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """Move or cast the model; its frequencies stay in float32, whatever the weights are cast to."""
        super()._apply(fn, recurse)
        self.inverse_frequencies = frequencies(self.shape)[0].to(self.inverse_frequencies.device)
        return self

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Draw random weights: matrices normal, norms 1, biases 0. The same on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


class Layer(nn.Module):
    """Attention, then a feed-forward network, each added to the stream that it reads."""

    def __init__(self, allocate: Allocate, name: str, index: int, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = Norm(allocate, f"{name}.attention_norm", shape.norm_eps)
        self.attention = SelfAttention(allocate, f"{name}.attention", index, shape)
        self.mlp_norm = Norm(allocate, f"{name}.mlp_norm", shape.norm_eps)
        self.mlp = FeedForward(allocate, f"{name}.mlp")

    def forward(self, x_TD: Tensor, turn: Rotation, attention: Attention) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), turn, attention)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class SelfAttention(nn.Module):
    """Queries, keys and values of the tokens, rotated by position; the attention itself is passed in."""

    def __init__(self, allocate: Allocate, name: str, index: int, shape: ModelShape) -> None:
        super().__init__()
        self.index = index
        self.head_dim = shape.head_dim
        self.q = Linear(allocate, f"{name}.q")
        self.k = Linear(allocate, f"{name}.k")
        self.v = Linear(allocate, f"{name}.v")
        self.q_norm = Norm(allocate, f"{name}.q_norm", shape.norm_eps) if shape.qk_norm else None
        self.k_norm = Norm(allocate, f"{name}.k_norm", shape.norm_eps) if shape.qk_norm else None
        self.output = Linear(allocate, f"{name}.output")

    def forward(self, x_TD: Tensor, turn: Rotation, attention: Attention) -> Tensor:
        q_THd = self.q(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKd = self.k(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKd = self.v(x_TD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TKd = self.q_norm(q_THd), self.k_norm(k_TKd)
        out_THd = attention(self.index, rotate(q_THd, turn), rotate(k_TKd, turn), v_TKd)
        return self.output(out_THd.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: a gated feed-forward network."""

    def __init__(self, allocate: Allocate, name: str) -> None:
        super().__init__()
        self.gate = Linear(allocate, f"{name}.gate")
        self.up = Linear(allocate, f"{name}.up")
        self.down = Linear(allocate, f"{name}.down")

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(functional.swiglu(self.gate(x_TD), self.up(x_TD)))


class Linear(nn.Module):
    """A matrix [outputs, inputs], with a bias where the table has one."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, allocate: Allocate, name: str) -> None:
        super().__init__()
        self.register_parameter("weight", allocate(f"{name}.weight"))
        self.register_parameter("bias", allocate(f"{name}.bias"))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A vector for each token of the vocabulary."""

    weight: nn.Parameter

    def __init__(self, allocate: Allocate, name: str) -> None:
        super().__init__()
        self.register_parameter("weight", allocate(f"{name}.weight"))

    def forward(self, tokens_T: Tensor) -> Tensor:
        return functional.embedding(tokens_T, self.weight)


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    weight: nn.Parameter

    def __init__(self, allocate: Allocate, name: str, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_parameter("weight", allocate(f"{name}.weight"))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight, self.eps)
