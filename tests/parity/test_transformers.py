"""Our transformer computes what Hugging Face's models compute, and checkpoints go through it unchanged."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from rlayout.model.attention import PackedAttention
from rlayout.model.huggingface import load_model, read_shape, save_model
from rlayout.model.transformer import Transformer
from rlayout.spec.parameters import parameters
from tests.parity.checkpoints import CASES, load_strictly, tiny_model

LENGTHS = (7, 1, 23, 12)


def packed_logits(model: Transformer, tokens: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    attention = PackedAttention(torch.tensor(lengths), model.shape)
    return model(tokens, positions, attention) @ model.head_weight.T


def oracle_logits(oracle: PreTrainedModel, tokens: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([oracle(sequence[None]).logits[0] for sequence in tokens.split(list(lengths))])


def some_tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_agree(case, tmp_path):
    oracle = tiny_model(case)
    oracle.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32)
    tokens = some_tokens(model.shape.vocab_size)

    expected = oracle_logits(oracle, tokens, LENGTHS)
    logits = packed_logits(model, tokens, LENGTHS)
    assert expected.std() > 0.3  # logits that say something
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    pull = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    logits.mul(pull).sum().backward()
    expected.mul(pull).sum().backward()
    theirs = dict(oracle.named_parameters())
    ours = dict(model.named_parameters())
    for parameter in parameters(model.shape):
        want, got = theirs[parameter.hf_name].grad, ours[parameter.name].grad
        assert want is not None
        assert got is not None
        # Sums over 43 tokens in another order; measured at most 3e-6 of the largest entry.
        assert (got - want).abs().max() <= 1e-5 * want.abs().max(), parameter.name


@pytest.mark.parametrize("case", CASES)
def test_round_trip_keeps_every_tensor(case, tmp_path):
    oracle = tiny_model(case)
    oracle.save_pretrained(tmp_path / "theirs")
    model = load_model(str(tmp_path / "theirs"), dtype=torch.float32)
    save_model(tmp_path / "ours", model.shape, dict(model.named_parameters()))

    assert read_shape(str(tmp_path / "ours")) == model.shape
    again = load_strictly(tmp_path / "ours")
    assert type(again) is type(oracle)
    tensors = again.state_dict()
    for name, tensor in oracle.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    tokens = some_tokens(model.shape.vocab_size)
    with torch.no_grad():
        # The config says the same too. Not equal to the bit: some processors' kernels round by address.
        torch.testing.assert_close(
            oracle_logits(again, tokens, LENGTHS), oracle_logits(oracle, tokens, LENGTHS), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("case", ["llama-tied", "qwen3"])
def test_sharded_checkpoints_in_both_directions(case, tmp_path):
    oracle = tiny_model(case)
    oracle.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = load_model(str(tmp_path / "theirs"), dtype=torch.float32)
    save_model(tmp_path / "ours", model.shape, dict(model.named_parameters()), shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = load_strictly(tmp_path / "ours")
    for name, tensor in oracle.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("case", ["llama-gqa", "llama-yarn", "qwen2", "qwen3", "mistral-window"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(case, tmp_path):
    oracle = tiny_model(case)
    oracle.save_pretrained(tmp_path)
    tokens = some_tokens(101)
    with torch.no_grad():
        exact = oracle_logits(oracle, tokens, LENGTHS)
        model = load_model(str(tmp_path), dtype=torch.bfloat16)
        ours = packed_logits(model, tokens, LENGTHS).float()
        theirs = oracle_logits(oracle.to(torch.bfloat16), tokens, LENGTHS).float()  # pyright: ignore
    our_error, their_error = (ours - exact).std(), (theirs - exact).std()
    # Both round at much the same places; measured ratios are 0.94 to 1.06.
    assert our_error <= 1.15 * their_error


@pytest.mark.parametrize("case", ["llama-yarn", "mistral-window", "qwen2-tied-windows"])
def test_packing_changes_nothing(case, tmp_path):
    tiny_model(case).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32)
    tokens = some_tokens(101)
    with torch.no_grad():
        packed = packed_logits(model, tokens, LENGTHS)
        alone = [packed_logits(model, t, (len(t),)) for t in tokens.split(list(LENGTHS))]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)
