import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from rlayout.model.hf_config import config_of_shape
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import num_parameters, parameters

MODELS = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "mistral": MistralForCausalLM,
}


@st.composite
def shapes(draw) -> ModelShape:
    family = draw(st.sampled_from(sorted(MODELS)))
    kv_heads, per_kv, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 8))
    heads = kv_heads * per_kv
    bias = family == "qwen2" or (family in {"llama", "qwen3"} and draw(st.booleans()))
    return ModelShape(
        family=family,
        vocab_size=draw(st.integers(1, 50)),
        hidden_size=heads * draw(st.integers(1, 12)),
        intermediate_size=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 4)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=64,
        qkv_bias=bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and draw(st.booleans()),
        qk_norm=family == "qwen3",
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_the_table_is_what_transformers_has(shape):
    with torch.device("meta"):
        family = MODELS[shape.family]
        model = family(family.config_class.from_dict(config_of_shape(shape)))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {p.hf_name: p.shape for p in parameters(shape)} == theirs
    assert num_parameters(shape) == model.num_parameters()


def test_layers_and_order():
    shape = ModelShape(
        family="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_positions=16,
    )
    table = parameters(shape)
    assert [p.layer for p in table] == [None, *[0] * 9, *[1] * 9, None, None]
    assert table[0].name == "embedding.weight"
    assert table[-1].name == "head.weight"
    assert len({p.name for p in table}) == len({p.hf_name for p in table}) == len(table)
    assert all(p.numel == torch.Size(p.shape).numel() for p in table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "num_heads 5 is not a multiple of num_kv_heads 2"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"sliding_window": 4, "sliding_layers": (3,)}, "sliding_layers"),
        ({"sliding_layers": (0,)}, "sliding_layers"),
        ({"sliding_window": 4}, "sliding_layers"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    sizes = {
        "family": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_positions": 16,
    }
    with pytest.raises(ValueError, match=message):
        ModelShape(**sizes | change)
