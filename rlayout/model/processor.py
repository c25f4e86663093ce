"""What this machine's processor can do."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_MULTIPLIES_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16", "svebf16"})
"""As Linux names the instructions of x86 and ARM processors."""


@cache
def instruction_sets() -> frozenset[str]:
    """The extensions that the operating system reports; empty where it does not say."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return frozenset()
    names = (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(names, "").partition(":")[2].split())


def name() -> str:
    """What code compiled for this processor alone depends on."""
    return " ".join(sorted(instruction_sets())) or platform.processor()


def multiplies_bfloat16() -> bool:
    """Whether there are instructions for bfloat16 products. Without them PyTorch's are several times slower
    than those of float32: 30 instead of 120 GFLOP/s measured on one core with AVX-512 alone.
    """
    return bool(instruction_sets() & _MULTIPLIES_BFLOAT16)
