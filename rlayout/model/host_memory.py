"""How the process gets memory from the operating system."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 64 << 20
"""Blocks from this size on go back at once: glibc places an aligned block of one size never where one of
the same size was freed (until 2.38), so keeping them would add up."""


_COMPILED_PRODUCTS = 32
"""One layer and the head have at most about 20 products, forward and backward; all layers have the same."""


def limit_compiled_products() -> None:
    """Bound the code that PyTorch keeps for matrix products. Once per process, before its first product.

    oneDNN compiles a product for every shape and by default keeps 1,024 of them, 0.6 MB each; packed
    sequences bring new shapes with every micro-batch. In bfloat16 a worker grew by 0.06 GiB per step so.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's, and PyTorch's in front
        os.environ.setdefault(cache, str(_COMPILED_PRODUCTS))


def keep_freed_memory() -> bool:
    """Make the allocator keep what is freed, for the next tensor. Once per process, before it works.

    By default glibc gives what is freed back to the system, and the next tensor faults in its pages one by
    one: a bfloat16 product with an output of 25 MB took 36 ms so, and 12 ms with pages that were there.

    Returns:
        Whether the allocator is one that can be told (glibc).
    """
    libc = _glibc()
    if libc is None:
        return False
    # Threads other than the first would get heaps of their own, which cannot hold large blocks.
    settings = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: 2**31 - 1}
    done = [libc.mallopt(name, value) for name, value in settings.items()]
    return all(done)


def return_freed_memory() -> None:
    """Give what is free inside the heap back to the system, after a phase that needed more than will follow."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None
