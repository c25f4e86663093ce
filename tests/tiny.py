"""A model small enough to train in a test, with a tokenizer of single characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlayout.model.huggingface import save_model
from rlayout.model.transformer import Transformer
from rlayout.spec.model_shape import ModelShape

CHARACTERS = "0123456789+-*/=# \n.,?:<>abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPECIAL = ("<pad>", "<user>", "<bot>", "<end>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] != 'assistant' else '<bot>' }}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}

SHAPE = ModelShape(
    family="llama",
    vocab_size=len(VOCABULARY),
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_positions=256,
    tie_embeddings=True,
)


def tokenizer(chat: bool = True) -> Any:
    """One token per character; unknown characters are dropped."""
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<bot>"],
    )
    if chat:
        made.chat_template = CHAT_TEMPLATE
    return made


def model(shape: ModelShape = SHAPE, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """A random model."""
    made = Transformer(shape, dtype=dtype)
    made.init_weights(seed, std=0.1)
    return made


def model_folder(folder: Path, shape: ModelShape = SHAPE, seed: int = 0, chat: bool = True) -> Path:
    """A Hugging Face folder with a random model and the character tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach() for name, p in model(shape, seed).named_parameters()}
    save_model(folder, shape, tensors, tokenizer(chat))
    return folder
