import pytest
import torch

from rlayout.model.attention import PackedAttention
from rlayout.model.transformer import Transformer
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import parameters
from tests import tiny

UNTIED = ModelShape(**{**vars(tiny.SHAPE), "tie_embeddings": False, "qkv_bias": True, "output_bias": True})


@pytest.mark.parametrize("shape", [tiny.SHAPE, UNTIED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_those_of_the_table(shape, dtype):
    model = Transformer(shape, dtype=dtype)
    named = [(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    assert named == [(p.name, p.shape, dtype) for p in parameters(shape)]
    assert set(model.state_dict()) == {p.name for p in parameters(shape)}


def test_tied_heads_share_the_embedding():
    model = tiny.model()
    assert model.head_weight is model.embedding.weight
    untied = tiny.model(UNTIED)
    assert untied.head_weight is not untied.embedding.weight
    assert untied.head_weight.shape == untied.embedding.weight.shape


def test_random_weights_depend_on_the_seed_alone():
    first, second, other = tiny.model(UNTIED, 1), tiny.model(UNTIED, 1), tiny.model(UNTIED, 2)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.dim() > 1:
            assert not torch.equal(a, c), name
            assert a.std().item() == pytest.approx(0.1, rel=0.1)
        else:
            assert torch.all(a == (0 if name.endswith("bias") else 1)), name


def hidden(
    model: Transformer, tokens: torch.Tensor, lengths: list[int], first_position: int = 0
) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths]) + first_position
    with torch.no_grad():
        return model(tokens, positions, PackedAttention(torch.tensor(lengths), model.shape))


def test_a_token_depends_on_those_before_it_alone():
    model, tokens = tiny.model(), torch.arange(20) % 30
    changed = tokens.clone()
    changed[12] += 1
    before, after = hidden(model, tokens, [8, 12]), hidden(model, changed, [8, 12])
    assert torch.equal(before[:12], after[:12])
    assert (before[12:] - after[12:]).abs().amax(-1).min() > 1e-4


def test_only_distances_between_tokens_matter():
    model, tokens = tiny.model(), torch.arange(16) % 30
    near, far = hidden(model, tokens, [16]), hidden(model, tokens, [16], first_position=100)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=0)  # angles of 100 radians have 6e-6 of rounding
    assert (near - hidden(model, tokens.flip(0), [16]).flip(0)).abs().max() > 1e-2


def test_attention_is_called_once_per_layer_with_its_number():
    model, seen = tiny.model(), []

    def attention(layer, q_THd, k_TKd, v_TKd):
        seen.append((layer, tuple(q_THd.shape), tuple(k_TKd.shape), tuple(v_TKd.shape)))
        return torch.zeros_like(q_THd)

    out = model(torch.arange(5), torch.arange(5), attention)
    assert out.shape == (5, 48)
    assert seen == [(layer, (5, 4, 12), (5, 2, 12), (5, 2, 12)) for layer in range(2)]


def test_positions_keep_float32_when_the_model_is_cast():
    model = tiny.model().to(torch.bfloat16)
    assert model.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(model.inverse_frequencies, tiny.model().inverse_frequencies)
    empty = Transformer(tiny.SHAPE, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    assert torch.equal(empty.inverse_frequencies, tiny.model().inverse_frequencies)
