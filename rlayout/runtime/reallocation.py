"""Carry out a transfer plan: the dull half of parameter reallocation."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlayout.planning.transfer import Move, TransferPlan

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Receipt:
    """What one device reports of a reallocation.

    Attributes:
        role: whose weights.
        version: the weight version that the device now holds.
        device: which device reports.
        digest: checksum of all parameters that it holds, in the order of their names.
        bytes_received: bytes that came from other devices.
        bytes_needed: bytes that the device needed and did not hold: the least possible.
        seconds: duration on this device, digest excluded.
    """

    role: str
    version: int
    device: int
    digest: str
    bytes_received: int
    bytes_needed: int
    seconds: float


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Checksum of names and contents, independent of the order of the mapping."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        flat = tensors[name].detach().contiguous().view(-1).view(torch.uint8)
        value = zlib.crc32(flat.cpu().numpy().data, value)
    return f"{value:08x}"


def transfer(plan: TransferPlan, tensors: Mapping[str, Tensor], device: int) -> tuple[int, float]:
    """Send and receive this device's moves in place, in buckets of bounded size.

    Args:
        plan: the moves between all devices; every device in it calls this with the same plan.
        tensors: this device's parameters by name; received boxes are written into them.
        device: this device's index, which is also its rank in the default process group.

    Returns:
        Bytes received and seconds.
    """
    start = time.perf_counter()
    received = 0
    for bucket in _buckets(plan, tensors):
        works, arrivals = [], []
        for tag, move in bucket:
            box = (
                tensors[move.parameter][tuple(slice(a, b) for a, b in move.box)]
                if _mine(move, device)
                else None
            )
            if box is None:
                continue
            if move.source == device:
                works.append(dist.isend(box.contiguous(), move.destination, tag=tag))
            else:
                buffer = box if box.is_contiguous() else torch.empty_like(box)
                works.append(dist.irecv(buffer, move.source, tag=tag))
                arrivals.append((box, buffer))
                received += box.numel() * box.element_size()
        for work in works:
            if work is not None:
                work.wait()
        for box, buffer in arrivals:
            if buffer is not box:
                box.copy_(buffer)
    return received, time.perf_counter() - start


def _mine(move: Move, device: int) -> bool:
    return device in (move.source, move.destination)


def _buckets(plan: TransferPlan, tensors: Mapping[str, Tensor]) -> Iterable[list[tuple[int, Move]]]:
    """Moves with their tags, cut where a bucket is full: the same cut on every device."""
    bucket: list[tuple[int, Move]] = []
    size = 0
    for tag, move in enumerate(plan.moves):
        numel = 1
        for a, b in move.box:
            numel *= b - a
        bucket.append((tag, move))
        size += numel * tensors[move.parameter].element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
