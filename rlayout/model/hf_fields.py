"""Which fields of a Hugging Face ``config.json`` are understood, and which change no number.

Every other field that is set is refused by name: it could change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlayout.errors import ModelError, nearest
from rlayout.spec.model_shape import Family


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


REQUIRED = _names("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads")
"""Where one is missing, transformers would take that of a 7B model."""

UNDERSTOOD = REQUIRED | _names("""
    model_type architectures num_key_value_heads head_dim max_position_embeddings rms_norm_eps
    tie_word_embeddings rope_theta rope_scaling rope_parameters attention_dropout
""")
_WINDOWS = _names("sliding_window use_sliding_window max_window_layers layer_types")
UNDERSTOOD_BY_FAMILY: Mapping[Family, frozenset[str]] = {
    "llama": _names("attention_bias mlp_bias"),
    "qwen2": _WINDOWS,
    "qwen3": _WINDOWS | _names("attention_bias"),
    "mistral": _names("sliding_window"),
}

PROVENANCE = _names("""
    _name_or_path transformers_version torch_dtype dtype initializer_range is_llama_config tokenizer_class
    transformers.js_config unsloth_fixed unsloth_version
""")
BEHAVIOUR = _names("""
    use_cache bos_token_id eos_token_id pad_token_id output_hidden_states output_attentions return_dict
    chunk_size_feed_forward _attn_implementation attn_implementation temperature top_p top_k do_sample
    max_length repetition_penalty
""")
"""How transformers' ``generate`` and ``forward`` behave, with the same logits."""
OTHER_HEADS = _names("id2label label2id num_labels problem_type task_specific_params")
"""For heads that a causal language model does not have."""
HARMLESS = PROVENANCE | BEHAVIOUR | OTHER_HEADS

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (0, 1),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
}
"""Values that change nothing, of fields that would otherwise."""

ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": _names("factor"),
    "llama3": _names("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": _names("""
        factor original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim
        truncate
    """),
}
"""What each kind of rotary embedding reads, besides rope_theta."""


def check_fields(raw: Mapping[str, Any], family: Family, where: str) -> None:
    """Refuse a config with a field that is required and missing, or set and not known.

    Raises:
        ModelError: with the field's name.
    """
    missing = sorted(field for field in REQUIRED if raw.get(field) is None)
    if missing:
        raise ModelError(f"{where}: {', '.join(missing)} missing")
    understood = UNDERSTOOD | UNDERSTOOD_BY_FAMILY[family]
    for field, value in raw.items():
        if field in understood or field in HARMLESS or _is_off(value):
            continue
        if field == "quantization_config":
            raise ModelError(f"{where}: quantization_config is set; give a model with unquantized weights")
        if field not in NEUTRAL:
            raise ModelError(
                f"{where}: field {field!r} ({value!r}) is not known for {family} models and may change what "
                f"the model computes; {nearest(field, understood | set(NEUTRAL))}"
            )
        if value not in NEUTRAL[field]:
            allowed = " or ".join(map(repr, NEUTRAL[field]))
            raise ModelError(f"{where}: {field} {value!r} is not supported, only {allowed}")


def check_rope_fields(rope: Mapping[str, Any], where: str) -> None:
    """Refuse a kind of rotary embedding that is not known, or a field that it does not read.

    Raises:
        ModelError: with the field's name.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_FIELDS:
        raise ModelError(f"{where}: rope_type {kind!r} is not supported; {nearest(str(kind), ROPE_FIELDS)}")
    known = ROPE_FIELDS[kind] | {"rope_type", "type", "rope_theta"}
    for field, value in rope.items():
        neutral = value is None or (field == "partial_rotary_factor" and value == 1)
        if field not in known and not neutral:
            raise ModelError(
                f"{where}: rope field {field!r} ({value!r}) is not known for rope_type {kind!r}; "
                f"{nearest(field, known)}"
            )


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ([], {})
