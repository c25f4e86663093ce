"""What a call cost on one device, measured."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Measured cost of a call on one device."""

    start: float
    """Seconds since the epoch."""
    seconds: float
    tokens: int
    """Tokens of the rows that were computed."""
    peak_memory_bytes: int
    """The largest resident size of the process until the end of the call."""


class Stopwatch:
    """Measures from its creation."""

    def __init__(self) -> None:
        self._wall = time.time()
        self._start = time.perf_counter()

    def usage(self, tokens: int) -> Usage:
        seconds = time.perf_counter() - self._start
        return Usage(self._wall, seconds, tokens, peak_memory_bytes())


def peak_memory_bytes() -> int:
    """The largest resident size that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
