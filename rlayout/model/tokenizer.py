"""Tokenizers: from a Hugging Face folder, or built from what a GGUF file says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlayout.errors import ModelError, nearest

if TYPE_CHECKING:
    from rlayout.model.gguf import GgufFile

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF

# How text is cut into words before byte-pair encoding, by the name that llama.cpp gives the model's way
# (tokenizer.ggml.pre). The patterns are those in the models' own tokenizer.json.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def from_folder(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    if not any((folder / file).is_file() for file in _FILES):
        raise ModelError(f"{folder} has no tokenizer: expected one of {', '.join(_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be read: {error}") from error


def from_gguf(file: GgufFile) -> PreTrainedTokenizerBase:
    """The byte-level BPE tokenizer that a GGUF file describes.

    Raises:
        ModelError: it describes none, or another kind.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = fields.get("model")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path}: tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level BPE)"
        )
    for needed in ("tokens", "merges", "token_type"):
        if needed not in fields:
            raise ModelError(f"{file.path}: tokenizer.ggml.{needed} is missing")
    tokens: list[str] = fields["tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in fields["merges"]],
        )
    )
    _set_words(tokenizer, str(fields.get("pre", "default")), file.path)
    special = [t for t, kind in zip(tokens, fields["token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    own = [t for t, kind in zip(tokens, fields["token_type"], strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])
    named = {
        f"{name}_token": tokens[fields[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in fields
    }
    if fields.get("add_bos_token", fields.get("pre") == "llama-bpe") and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
                ),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **named,
    )


def _set_words(tokenizer: Tokenizer, pre: str, path: Path) -> None:
    """Set how ``tokenizer`` cuts text into words, and how it puts tokens together again."""
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ways = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"), bytes_of_words],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"), bytes_of_words],
    }
    if pre not in ways:
        raise ModelError(f"{path}: tokenizer.ggml.pre {pre!r} is not supported; {nearest(pre, ways)}")
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(ways[pre])
    tokenizer.decoder = decoders.ByteLevel()
