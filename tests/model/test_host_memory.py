"""What a process keeps of the system's memory."""

import subprocess
import sys

import pytest

PRODUCTS_OF_MANY_SHAPES = """
import ctypes
import torch
from rlayout.model.host_memory import limit_compiled_products

NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")


class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def heap_bytes():
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap
    return libc.mallinfo2().used


torch.set_num_threads(1)
limit_compiled_products()
weight = torch.zeros(1536, 576, dtype=torch.bfloat16)
for rows in range(300, 500):
    if rows == 400:
        before = heap_bytes()
    torch.nn.functional.linear(torch.zeros(rows, 576, dtype=torch.bfloat16), weight)
print(heap_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the heap of glibc")
def test_products_of_ever_new_shapes_do_not_add_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS_OF_MANY_SHAPES], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 5_000_000  # without the bound: 60 MB on a processor with AVX512-BF16
