"""Compile ``native.c`` with the machine's C compiler, once per dtype, version and processor, and call it.

Where there is no compiler everything still works, through PyTorch's own operations, only slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rlayout.model import processor

_FLAGS = (
    *("-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC", "-shared", "-std=c11"),
    # What vectorizing an exponential needs of -ffast-math; infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math"),
    "-ffp-contract=fast",  # -std=c11 alone forbids fused multiply-add
)

_ELEMENTS = {torch.bfloat16: (), torch.float32: ("-DELEMENT_FLOAT32",)}
"""Dtypes of the elements, with what the compiler is told of them."""
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_TYPES = {"p": _POINTER, "l": _LONG, "f": _FLOAT}
_ARGUMENTS = {
    "transpose": "ppll",
    "accumulate": "ppl",
    "square_sum": "ppl",
    "rms_norm": "ppppllf",
    "rms_norm_backward": "ppppppll",
    "swiglu": "pppl",
    "swiglu_backward": "pppppl",
    "rotate": "pppplllf",
    "softmax": "pllllllf",
    "softmax_backward": "ppllllllf",
    "head_add": "ppppllf",
    "head_backward": "ppppllf",
    "adamw": "pppplffffffff",
    "decode_attention": "pppppllllllf",
}
"""The parameters of each C function: pointer, long, float."""


def usable(*tensors: Tensor) -> bool:
    """Whether the C functions can work on these: contiguous, on a CPU, of one dtype that they know, and a
    compiler exists.
    """
    dtype = tensors[0].dtype
    if dtype not in _ELEMENTS:
        return False
    for tensor in tensors:  # asked several times per layer of a decode step: a generator would take longer
        if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
            return False
    return available()


@cache
def available() -> bool:
    """Whether the C functions can be called at all. The first call may compile them (about a second)."""
    return all(_library(dtype) is not None for dtype in _ELEMENTS)


def call(name: str, elements: Tensor, *arguments: Tensor | int | float) -> None:
    """Call a function of ``native.c``, for the dtype of ``elements``. Tensors are contiguous and outlive it."""
    library = _library(elements.dtype)
    assert library is not None
    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in (elements, *arguments)]
    getattr(library, name)(*values)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    source = Path(__file__).with_name("native.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logging.getLogger(__name__).warning("no C compiler found: training on CPU will be slower")
        return None
    command = (compiler, *_FLAGS, *_ELEMENTS[dtype])
    text = source.read_bytes() + " ".join((*command, processor.name())).encode()
    target = _cache_folder() / f"native-{hashlib.sha256(text).hexdigest()[:16]}.so"
    try:
        if not target.exists():
            _compile(command, source, target)
        return _declare(ctypes.CDLL(str(target)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        logging.getLogger(__name__).warning("CPU kernels cannot be built, training will be slower: %s", detail)
        return None


def _compile(command: Sequence[str], source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several workers may compile at once: each writes a file of its own and the last rename wins.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        subprocess.run([*command, "-o", str(built), str(source), "-lm"], check=True, capture_output=True)
        built.replace(target)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[a] for a in arguments]
        function.restype = None
    return library


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlayout"
