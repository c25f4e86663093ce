"""Weights in safetensors files, under their Hugging Face names; one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlayout.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder, by its name there; valid until the next one is asked for.

    Raises:
        ModelError: a file is missing or damaged.
    """
    for file in _weight_files(folder):
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                yield name, opened.get_tensor(name)


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint folder, from the files' headers alone.

    Raises:
        ModelError: a file is missing, truncated or damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        with _opened(file) as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int) -> None:
    """Write tensors as one file, or as several of at most ``shard_bytes`` with an index.

    Args:
        folder: exists.
        tensors: by Hugging Face name, on any device.
        dtype: of the tensors in the files.
        shard_bytes: a larger tensor gets a file of its own.

    Raises:
        OSError: writing failed.
    """
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in tensors.items()}
    shards = divide(sizes, shard_bytes)
    if len(shards) == 1:
        _write(folder / SINGLE, tensors, shards[0], dtype)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, tensors, names, dtype)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, in runs of at most ``limit`` bytes (or of one name)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing; {INDEX} names it") from error
    except SafetensorError as error:
        raise ModelError(f"{file} is truncated or damaged: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return [folder / file for file in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
    hint = "; it holds pickled weights: convert them to safetensors" if pickled else ""
    raise ModelError(f"{folder} has no {SINGLE} and no {INDEX}{hint}")


def _write(file: Path, tensors: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> None:
    shard = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
    try:
        save_file(shard, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {file}: {error}") from error
