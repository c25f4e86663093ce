"""GGUF files (llama.cpp's format) of the Llama, Qwen2 and Qwen3 families.

The header is read here: the gguf package's own reader takes seconds for a vocabulary of 49,152 tokens.
Dequantizing is the package's. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from rlayout.errors import ModelError, nearest
from rlayout.spec.model_shape import Family, ModelShape, RopeScaling
from rlayout.spec.parameters import Parameter, parameters

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_FAMILIES: Mapping[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_UNDERSTOOD = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length
    """.split()  # noqa: SIM905 (reads better than fifteen lines)
)

_MODULES: Mapping[str, str] = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.output": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    """In bytes from the start of the file."""

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size


class GgufFile:
    """An opened GGUF file: its metadata, and its tensors one at a time."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: the file is not GGUF, or is truncated or damaged.
        """
        self.path = path
        try:
            with path.open("rb") as stream:
                self.metadata, self._stored = _read_header(stream)
        except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
            raise ModelError(f"{path} is not a GGUF file, or its header is damaged: {error}") from error
        end = max((stored.offset + stored.nbytes for stored in self._stored.values()), default=0)
        if end > path.stat().st_size:
            raise ModelError(f"{path} is truncated: {path.stat().st_size} of at least {end} bytes")

    @property
    def shape(self) -> ModelShape:
        """The model's shape.

        Raises:
            ModelError: the file holds a model that rlayout does not compute exactly.
        """
        architecture = str(self.metadata.get("general.architecture"))
        if architecture not in _FAMILIES:
            raise ModelError(
                f"{self.path}: architecture {architecture!r} is not supported; "
                f"{nearest(architecture, _FAMILIES)}"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(f"{self.path} is one part of several; merge them with llama-gguf-split")
        prefix = f"{architecture}."
        fields = {key.removeprefix(prefix): v for key, v in self.metadata.items() if key.startswith(prefix)}
        for field, value in fields.items():
            if field not in _UNDERSTOOD and value not in (0, False):
                raise ModelError(
                    f"{self.path}: field {prefix + field!r} ({value!r}) is not known and may change what the "
                    f"model computes; {nearest(field, _UNDERSTOOD)}"
                )
        try:
            return _shape(fields, _FAMILIES[architecture], self._stored)
        except KeyError as error:
            raise ModelError(f"{self.path}: field {prefix}{error.args[0]} is missing") from error
        except ValueError as error:
            raise ModelError(f"{self.path}: {error}") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the file, dequantized to float32, under its Hugging Face name.

        Raises:
            ModelError: the file holds a tensor that the model does not have.
        """
        shape = self.shape
        table = {_gguf_name(parameter): parameter for parameter in parameters(shape)}
        content = np.memmap(self.path, mode="r").view(np.ndarray)
        for name, stored in self._stored.items():
            if name not in table:
                raise ModelError(f"{self.path}: unexpected tensor {name!r}; {nearest(name, table)}")
            weights = torch.from_numpy(_dequantized(content, stored))
            if shape.family == "llama" and ".attn_q." in name:
                weights = _halves(weights, shape.num_heads)
            elif shape.family == "llama" and ".attn_k." in name:
                weights = _halves(weights, shape.num_kv_heads)
            yield table[name].hf_name, weights


def _halves(weights: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from interleaved pairs (llama.cpp's order for Llama) to first and second halves."""
    pairs = weights.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weights.shape)


def _dequantized(content: np.ndarray, stored: _Stored) -> np.ndarray:
    raw = content[stored.offset : stored.offset + stored.nbytes]
    # The package reads plain floats by their own type, everything else as bytes.
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    if stored.kind in plain:
        return raw.view(plain[stored.kind]).astype(np.float32).reshape(stored.shape)
    # It works on 16 rows at a time, which costs more in calls than in arithmetic: make the rows longer.
    rows = stored.shape[0] // math.gcd(stored.shape[0], 64)
    return dequantize(raw.reshape(rows, -1), stored.kind).reshape(stored.shape)


def _shape(fields: Mapping[str, Any], family: Family, stored: Mapping[str, _Stored]) -> ModelShape:
    num_heads = fields["attention.head_count"]
    head_dim = fields.get("attention.key_length", fields["embedding_length"] // num_heads)
    for field in ("rope.dimension_count", "attention.value_length"):
        if fields.get(field, head_dim) != head_dim:
            raise ValueError(f"{field} is {fields[field]}, but heads have {head_dim} dimensions")
    return ModelShape(
        family=family,
        vocab_size=stored["token_embd.weight"].shape[0],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_layers=fields["block_count"],
        num_heads=num_heads,
        num_kv_heads=fields.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=fields["context_length"],
        rope_theta=fields.get("rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(fields),
        norm_eps=fields["attention.layer_norm_rms_epsilon"],
        qkv_bias="blk.0.attn_q.bias" in stored,
        output_bias="blk.0.attn_output.bias" in stored,
        mlp_bias="blk.0.ffn_gate.bias" in stored,
        qk_norm="blk.0.attn_q_norm.weight" in stored,
        tie_embeddings="output.weight" not in stored,
    )


def _rope_scaling(fields: Mapping[str, Any]) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported, only none, linear and yarn")
    original = fields.get("rope.scaling.original_context_length", 0)
    if kind == "linear":
        return RopeScaling("linear", fields["rope.scaling.factor"])
    return RopeScaling("yarn", fields["rope.scaling.factor"], original or fields["context_length"])


def _gguf_name(parameter: Parameter) -> str:
    if parameter.layer is None:
        module, kind = parameter.name.rsplit(".", 1)
        return f"{_MODULES[module]}.{kind}"
    module, kind = parameter.name.removeprefix(f"layers.{parameter.layer}.").rsplit(".", 1)
    return f"blk.{parameter.layer}.{_MODULES[module]}.{kind}"


def _read_header(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, _Stored]]:
    magic, version, num_tensors, num_fields = _unpack(stream, "4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it starts with {magic!r}, version {version}; expected b'GGUF', version 2 or 3")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = _read_string(stream)
        metadata[key] = _read_value(stream, _unpack(stream, "I")[0])
    listed = [_read_tensor_info(stream) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(stream.tell() / alignment) * alignment
    return metadata, {name: _Stored(shape, kind, start + offset) for name, shape, kind, offset in listed}


def _read_tensor_info(stream: BinaryIO) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = _read_string(stream)
    (num_dims,) = _unpack(stream, "I")
    shape = _unpack(stream, f"{num_dims}Q")[::-1]  # the fastest dimension comes first in the file
    kind, offset = _unpack(stream, "IQ")
    return name, shape, GGMLQuantizationType(kind), offset


def _read_value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _read_string(stream)
    if kind != _ARRAY:
        return _unpack(stream, _NUMBERS[kind])[0]
    item, count = _unpack(stream, "IQ")
    if item in _NUMBERS:
        return list(_unpack(stream, f"{count}{_NUMBERS[item]}"))
    return [_read_value(stream, item) for _ in range(count)]


def _read_string(stream: BinaryIO) -> str:
    (length,) = _unpack(stream, "Q")
    return _read_exactly(stream, length).decode()


def _unpack(stream: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", _read_exactly(stream, struct.calcsize(f"<{layout}")))


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise ValueError("the file ends in the middle of its header")
    return data
