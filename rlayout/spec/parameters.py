"""What the parameters of a model are: the one table that everything which touches weights reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlayout.spec.model_shape import ModelShape


@dataclass(frozen=True)
class Parameter:
    """One trainable tensor of a model."""

    name: str
    """Its name in ``Transformer.named_parameters()`` and everywhere else in rlayout."""
    hf_name: str
    """Its name in a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    """The whole tensor's shape; a matrix is [outputs, inputs]."""
    layer: int | None
    """The layer that it belongs to; None for the embedding, the last norm and the head."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """All parameters in the order in which a forward pass uses them.

    Tied embeddings appear once, as the embedding.
    """
    vocabulary = (shape.vocab_size, shape.hidden_size)
    table = [Parameter("embedding.weight", "model.embed_tokens.weight", vocabulary, None)]
    for layer in range(shape.num_layers):
        table.extend(
            Parameter(f"layers.{layer}.{name}", f"model.layers.{layer}.{hf_name}", size, layer)
            for name, hf_name, size in _layer(shape)
        )
    table.append(Parameter("norm.weight", "model.norm.weight", (shape.hidden_size,), None))
    if not shape.tie_embeddings:
        table.append(Parameter("head.weight", "lm_head.weight", vocabulary, None))
    return tuple(table)


def num_parameters(shape: ModelShape) -> int:
    """Number of weights of a model, tied ones counted once."""
    return sum(parameter.numel for parameter in parameters(shape))


def _layer(shape: ModelShape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, Hugging Face name and shape of each parameter of a layer."""
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head

    yield "attention_norm.weight", "input_layernorm.weight", (hidden,)
    yield from _linear("attention.q", "self_attn.q_proj", queries, hidden, shape.qkv_bias)
    yield from _linear("attention.k", "self_attn.k_proj", keys, hidden, shape.qkv_bias)
    yield from _linear("attention.v", "self_attn.v_proj", keys, hidden, shape.qkv_bias)
    if shape.qk_norm:
        yield "attention.q_norm.weight", "self_attn.q_norm.weight", (head,)
        yield "attention.k_norm.weight", "self_attn.k_norm.weight", (head,)
    yield from _linear("attention.output", "self_attn.o_proj", hidden, queries, shape.output_bias)
    yield "mlp_norm.weight", "post_attention_layernorm.weight", (hidden,)
    yield from _linear("mlp.gate", "mlp.gate_proj", inner, hidden, shape.mlp_bias)
    yield from _linear("mlp.up", "mlp.up_proj", inner, hidden, shape.mlp_bias)
    yield from _linear("mlp.down", "mlp.down_proj", hidden, inner, shape.mlp_bias)


def _linear(
    name: str, hf_name: str, outputs: int, inputs: int, bias: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield f"{name}.weight", f"{hf_name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", f"{hf_name}.bias", (outputs,)
