"""Tokenizers: from a Hugging Face folder, or built from what a GGUF file says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from rlayout.errors import ModelError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlayout.model.gguf import GgufFile

# transformers is imported where it is used: it takes seconds and 90 MB, which a worker has no use for.

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF

# How text is cut into words before byte-pair encoding, by the name that llama.cpp gives the model's way
# (tokenizer.ggml.pre). The patterns are those in the models' own tokenizer.json.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS: Mapping[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"), _BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"), _BYTES],
}


def from_folder(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in _FILES):
        raise ModelError(f"{folder} has no tokenizer: expected one of {', '.join(_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelError(f"{folder}: the tokenizer cannot be read: {error}") from error


def from_gguf(file: GgufFile) -> PreTrainedTokenizerBase:
    """The byte-level BPE tokenizer that a GGUF file describes.

    Raises:
        ModelError: it describes none, or another kind.
    """
    fields = _fields(file)
    kind = fields.get("model")
    if kind != "gpt2":
        raise ModelError(f"{file.path}: tokenizer model {kind!r} is not supported, only 'gpt2' (byte BPE)")
    for needed in ("tokens", "merges", "token_type"):
        if needed not in fields:
            raise ModelError(f"{file.path}: {_PREFIX}{needed} is missing")
    pre = str(fields.get("pre", "default"))
    if pre not in _WORDS:
        raise ModelError(f"{file.path}: {_PREFIX}pre {pre!r} is not supported; {nearest(pre, _WORDS)}")
    try:
        named = _named_tokens(fields)
        backend = _backend(fields, pre)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelError(f"{file.path}: the tokenizer is damaged: {error}") from error
    if fields.get("add_bos_token", pre == "llama-bpe") and "bos_token" in named:
        _start_with(backend, named["bos_token"])
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **named,
    )


def end_token_of_gguf(file: GgufFile) -> int | None:
    """The end token that a GGUF file names, without building its tokenizer."""
    return _fields(file).get("eos_token_id")


def _fields(file: GgufFile) -> dict[str, Any]:
    return {key.removeprefix(_PREFIX): v for key, v in file.metadata.items() if key.startswith(_PREFIX)}


def _named_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that have a part to play, as PreTrainedTokenizerFast names them."""
    parts = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        f"{name}_token": fields["tokens"][fields[f"{key}_token_id"]]
        for name, key in parts.items()
        if f"{key}_token_id" in fields
    }


def _backend(fields: Mapping[str, Any], pre: str) -> Tokenizer:
    tokens: list[str] = fields["tokens"]
    merges: list[tuple[str, str]] = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, even where its merges would not lead there.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_WORDS[pre])
    backend.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, fields["token_type"], strict=True))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind == _CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind == _USER_DEFINED])
    return backend


def _start_with(backend: Tokenizer, bos: str) -> None:
    """Put the token ``bos`` before every text."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )
