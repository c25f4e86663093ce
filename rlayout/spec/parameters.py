"""What the parameters of a model are: the one table that everything which touches weights reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from rlayout.spec.model_shape import ModelShape


class Unit(Enum):
    """What a dimension that tensor ranks divide is made of; a unit is never cut."""

    QUERY_HEAD = "query head"
    KV_HEAD = "key-value head"
    INNER = "feed-forward row"
    WORD = "word of the vocabulary"


@dataclass(frozen=True)
class Split:
    """Tensor ranks divide dimension ``dim`` of a parameter between units."""

    dim: int
    unit: Unit


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
    split: Split | None = None
    """How tensor ranks divide it; None: each holds all of it."""
    once: bool = False
    """Whether the first tensor rank alone holds it: a bias that is added to a sum over ranks."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """All parameters in the order in which a forward pass uses them.

    Tied embeddings appear once, as the embedding.
    """
    vocabulary = (shape.vocab_size, shape.hidden_size)
    words = Split(0, Unit.WORD)
    table = [Parameter("embedding.weight", "model.embed_tokens.weight", vocabulary, None, words)]
    for layer in range(shape.num_layers):
        table.extend(
            replace(
                p, name=f"layers.{layer}.{p.name}", hf_name=f"model.layers.{layer}.{p.hf_name}", layer=layer
            )
            for p in _layer(shape)
        )
    table.append(Parameter("norm.weight", "model.norm.weight", (shape.hidden_size,), None))
    if not shape.tie_embeddings:
        table.append(Parameter("head.weight", "lm_head.weight", vocabulary, None, words))
    return tuple(table)


def num_parameters(shape: ModelShape) -> int:
    """Number of weights of a model, tied ones counted once."""
    return sum(parameter.numel for parameter in parameters(shape))


def _layer(shape: ModelShape) -> Iterator[Parameter]:
    """The parameters of a layer, named within it."""
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head

    yield _norm("attention_norm", "input_layernorm", hidden)
    yield from _to_units("attention.q", "self_attn.q_proj", (queries, hidden), Unit.QUERY_HEAD, shape.qkv_bias)
    yield from _to_units("attention.k", "self_attn.k_proj", (keys, hidden), Unit.KV_HEAD, shape.qkv_bias)
    yield from _to_units("attention.v", "self_attn.v_proj", (keys, hidden), Unit.KV_HEAD, shape.qkv_bias)
    if shape.qk_norm:
        yield _norm("attention.q_norm", "self_attn.q_norm", head)
        yield _norm("attention.k_norm", "self_attn.k_norm", head)
    yield from _from_units(
        "attention.output", "self_attn.o_proj", (hidden, queries), Unit.QUERY_HEAD, shape.output_bias
    )
    yield _norm("mlp_norm", "post_attention_layernorm", hidden)
    yield from _to_units("mlp.gate", "mlp.gate_proj", (inner, hidden), Unit.INNER, shape.mlp_bias)
    yield from _to_units("mlp.up", "mlp.up_proj", (inner, hidden), Unit.INNER, shape.mlp_bias)
    yield from _from_units("mlp.down", "mlp.down_proj", (hidden, inner), Unit.INNER, shape.mlp_bias)


def _norm(name: str, hf_name: str, size: int) -> Parameter:
    return Parameter(f"{name}.weight", f"{hf_name}.weight", (size,), None)


def _to_units(name: str, hf_name: str, size: tuple[int, int], unit: Unit, bias: bool) -> Iterator[Parameter]:
    """A matrix [units, inputs]: each tensor rank computes its own units."""
    yield Parameter(f"{name}.weight", f"{hf_name}.weight", size, None, Split(0, unit))
    if bias:
        yield Parameter(f"{name}.bias", f"{hf_name}.bias", size[:1], None, Split(0, unit))


def _from_units(name: str, hf_name: str, size: tuple[int, int], unit: Unit, bias: bool) -> Iterator[Parameter]:
    """A matrix [outputs, units]: the ranks' products are summed."""
    yield Parameter(f"{name}.weight", f"{hf_name}.weight", size, None, Split(1, unit))
    if bias:
        yield Parameter(f"{name}.bias", f"{hf_name}.bias", size[:1], None, once=True)
