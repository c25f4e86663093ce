"""Tiny random transformers models, one for every feature of the supported families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1_000.0, **fields}}


_LLAMA3 = _rope(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_YARN = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
_YARN_ALL_FIELDS = _rope(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=4.0,
    beta_slow=0.9,
    mscale=0.7,
    mscale_all_dim=1.3,
    truncate=False,
)
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}

CASES: Mapping[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "llama-gqa": (LlamaForCausalLM, {}),
    "llama-mha": (LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama-one-kv-head": (LlamaForCausalLM, {"num_key_value_heads": 1}),
    "llama-tied": (LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (LlamaForCausalLM, {"head_dim": 12}),
    "llama-linear-rope": (LlamaForCausalLM, _rope(rope_type="linear", factor=3.0)),
    "llama-llama3-rope": (LlamaForCausalLM, _LLAMA3),
    "llama-yarn": (LlamaForCausalLM, _YARN),
    "llama-yarn-all-fields": (LlamaForCausalLM, {"head_dim": 32, **_YARN_ALL_FIELDS}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen2-tied-windows": (
        Qwen2ForCausalLM,
        {"tie_word_embeddings": True, "max_window_layers": 1, **_WINDOWS},
    ),
    "qwen2-yarn": (Qwen2ForCausalLM, _YARN),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-bias-tied": (
        Qwen3ForCausalLM,
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-layer-types": (
        Qwen3ForCausalLM,
        {
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **_WINDOWS,
        },
    ),
    "mistral-window": (MistralForCausalLM, {"sliding_window": 5}),
    "mistral-head-dim": (MistralForCausalLM, {"sliding_window": None, "head_dim": 12}),
}


def tiny_model(case: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model with every weight drawn at random, norms and biases too, so that none can be mixed up."""
    kind, changes = CASES[case]
    config_class: Any = kind.config_class
    model = kind(config_class(**_SIZES | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)
            parameter.copy_(1 + noise if "norm" in name else noise)
    return model


def load_strictly(folder: Path) -> PreTrainedModel:
    """What transformers loads from a folder, provided that no tensor is missing or unexpected."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    return model
