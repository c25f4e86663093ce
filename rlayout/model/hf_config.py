"""Hugging Face's ``config.json`` to and from a model shape.

A field that could change the numbers is either understood or refused by name; none is ignored. Values that a
file leaves out are filled in by transformers' own config classes, so that both read the same model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

from rlayout.errors import ModelError, nearest
from rlayout.model.hf_fields import ROPE_FIELDS, check_fields, check_rope_fields
from rlayout.spec.model_shape import Family, ModelShape, RopeScaling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def shape_of_config(raw: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a ``config.json`` describes.

    Args:
        raw: the file's content.
        where: what error messages call it.

    Raises:
        ModelError: it describes a model that rlayout does not compute exactly.
    """
    from huggingface_hub.errors import StrictDataclassError  # with transformers: seconds, where not needed

    family = _family(raw, where)
    check_fields(raw, family, where)
    _refuse_contradiction(raw, where)
    try:
        config: Any = _class_of(family).from_dict(dict(raw))
        shape = _shape(config, family, where)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{where}: {error}") from error
    if config.attention_dropout:
        warnings.warn(
            f"{where}: attention_dropout is {config.attention_dropout}; rlayout trains without dropout",
            stacklevel=2,
        )
    return shape


def config_of_shape(shape: ModelShape) -> dict[str, Any]:
    """A ``config.json`` that transformers 4 and 5 read as this shape."""
    scaling = _rope_fields(shape.rope_scaling)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": shape.rope_theta, **(scaling or {"rope_type": "default"})},
        "attention_dropout": 0.0,
    }
    if shape.family in {"llama", "qwen3"}:
        config["attention_bias"] = shape.qkv_bias
    if shape.family == "llama":
        config["mlp_bias"] = shape.mlp_bias
    if shape.family == "mistral":
        config["sliding_window"] = shape.sliding_window
    if shape.family in {"qwen2", "qwen3"}:
        config |= _window_fields(shape)
    _refuse_inexpressible(shape, config)
    return config


def _class_of(family: Family) -> type[PreTrainedConfig]:
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
    return classes[family]


def _family(raw: Mapping[str, Any], where: str) -> Family:
    family = raw.get("model_type")
    if family not in get_args(Family):
        raise ModelError(
            f"{where}: model_type {family!r} is not supported; {nearest(str(family), get_args(Family))}"
        )
    family = cast(Family, family)
    architectures = raw.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        raise ModelError(f"{where}: architectures {architectures}, expected [{ARCHITECTURES[family]!r}]")
    return family


def _refuse_contradiction(raw: Mapping[str, Any], where: str) -> None:
    """The old form (rope_theta, rope_scaling) and the new one (rope_parameters) may stand side by side."""
    new = raw.get("rope_parameters") or {}
    old = dict(raw.get("rope_scaling") or {})
    if raw.get("rope_theta") is not None:
        old["rope_theta"] = raw["rope_theta"]
    for field in old.keys() & new.keys():
        if old[field] != new[field]:
            raise ModelError(
                f"{where}: {field} is {new[field]!r} in rope_parameters and {old[field]!r} outside of it"
            )


def _shape(config: Any, family: Family, where: str) -> ModelShape:
    window, sliding_layers = _windows(config, family, where)
    attention_bias = family == "qwen2" or bool(getattr(config, "attention_bias", False))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_positions=config.max_position_embeddings,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        rope_scaling=_rope_scaling(config.rope_parameters, config.max_position_embeddings, where),
        norm_eps=config.rms_norm_eps,
        qkv_bias=attention_bias,
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        tie_embeddings=config.tie_word_embeddings,
        sliding_window=window,
        sliding_layers=sliding_layers,
    )


def _windows(config: Any, family: Family, where: str) -> tuple[int | None, tuple[int, ...]]:
    window = getattr(config, "sliding_window", None)
    if family == "llama" or (family == "mistral" and window is None):
        return None, ()
    if family == "mistral":
        return window, tuple(range(config.num_hidden_layers))
    unknown = set(config.layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"{where}: layer_types names {sorted(unknown)}; supported: full_attention, sliding_attention"
        )
    layers = tuple(i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention")
    if layers and window is None:
        raise ModelError(
            f"{where}: layer_types names sliding_attention, but sliding_window or use_sliding_window is off"
        )
    return (window, layers) if layers else (None, ())


def _rope_scaling(rope: Mapping[str, Any], max_positions: int, where: str) -> RopeScaling | None:
    check_rope_fields(rope, where)
    kind = rope["rope_type"]
    if kind == "default":
        return None
    original = int(rope.get("original_max_position_embeddings") or 0)
    given = {
        field: rope[field]
        for field in ROPE_FIELDS[kind] - {"factor", "original_max_position_embeddings"}
        if rope.get(field) is not None
    }
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / original
    if factor is None:
        raise ModelError(f"{where}: rope_type {kind!r} has no factor")
    return RopeScaling(kind=kind, factor=float(factor), original_max_positions=original, **given)


def _rope_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_positions,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
        "truncate": scaling.truncate,
    }
    known = ROPE_FIELDS[scaling.kind]
    fields = {field: value for field, value in values.items() if field in known and value is not None}
    return {"rope_type": scaling.kind, **fields}


def _window_fields(shape: ModelShape) -> dict[str, Any]:
    kinds = ["sliding_attention" if shape.window(i) else "full_attention" for i in range(shape.num_layers)]
    first = min(shape.sliding_layers, default=shape.num_layers)
    return {
        "use_sliding_window": shape.sliding_window is not None,
        "sliding_window": shape.sliding_window,
        "max_window_layers": first,
        "layer_types": kinds,
    }


def _refuse_inexpressible(shape: ModelShape, config: dict[str, Any]) -> None:
    """A shape made by hand, or read from GGUF, may be one that no config of its family describes."""
    if shape_of_config(config, "config.json") != shape:
        raise ModelError(f"no {shape.family} config.json describes this shape: {shape}")
