"""Gradients of several micro-batches summed in float32, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rlayout.model.flat import Entry, FlatTable
from rlayout.model.functional import add_to


class GradientSum:
    """Adds each parameter's gradient to a flat float32 buffer as soon as it is complete, and frees it.

    A bfloat16 sum over micro-batches would lose small ones, and gradients of all parameters never exist at
    once in two precisions.
    """

    def __init__(self, model: nn.Module, table: FlatTable) -> None:
        self._table = table
        self._flat: Tensor | None = None
        parameters = dict(model.named_parameters())
        for entry in table.entries:
            parameters[entry.name].register_post_accumulate_grad_hook(self._hook(entry))

    @contextmanager
    def collect(self, flat: Tensor) -> Iterator[Tensor]:
        """Add the gradients of every backward pass in this context to ``flat`` (see FlatTable)."""
        self._flat = flat
        try:
            yield flat
        finally:
            self._flat = None

    def _hook(self, entry: Entry) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if self._flat is not None and parameter.grad is not None:
                add_to(self._table.view(self._flat, entry), parameter.grad)
                parameter.grad = None

        return add
