"""Every parameter of a model in one flat space, which data-parallel ranks divide into equal slices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """One parameter's place: elements ``offset`` to ``offset + numel`` of the flat space."""

    name: str
    offset: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in a slice: flat elements ``start`` to ``stop``."""

    entry: Entry
    start: int
    stop: int


class FlatTable:
    """Where each parameter lies: one after the other in the order given, without gaps."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.entries: list[Entry] = []
        self.numel = 0
        for name, parameter in parameters:
            self.entries.append(Entry(name, self.numel, parameter.shape))
            self.numel += parameter.numel()
        self._offsets = [entry.offset for entry in self.entries]

    def padded(self, num_slices: int) -> int:
        """Elements of a buffer that ``num_slices`` equal slices fill; those past ``numel`` are padding."""
        return -(-self.numel // num_slices) * num_slices

    def at(self, index: int) -> Entry:
        """The parameter that owns flat element ``index``."""
        return self.entries[bisect_right(self._offsets, index) - 1]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts of parameters in flat elements ``start`` to ``stop``, in order."""
        for entry in self.entries:
            low, high = max(start, entry.offset), min(stop, entry.offset + entry.numel)
            if low < high:
                yield Piece(entry, low, high)

    def view(self, flat: Tensor, entry: Entry) -> Tensor:
        """The parameter's values in ``flat``, in its shape."""
        return flat[entry.offset : entry.offset + entry.numel].view(entry.shape)

    def adopt(self, module: nn.Module, num_slices: int) -> Tensor:
        """Move the parameters of ``module`` into one flat buffer, of which they become views; return it.

        They must all have one dtype and device.
        """
        parameters = dict(module.named_parameters())
        first = next(iter(parameters.values()))
        flat = first.new_zeros(self.padded(num_slices), requires_grad=False)
        for entry in self.entries:
            place = self.view(flat, entry)
            place.copy_(parameters[entry.name].detach())
            parameters[entry.name].data = place
        return flat
