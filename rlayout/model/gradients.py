"""Gradients of several micro-batches summed in float32, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rlayout.model.flat import Entry, FlatTable
from rlayout.model.functional import GRADIENT_SINK, add_to


class GradientSum:
    """Adds each parameter's gradient to a flat float32 buffer as soon as it is known.

    A bfloat16 sum over micro-batches would lose small ones, and gradients of all parameters never exist at
    once in two precisions. Functions that know of the sink (functional.py, head.py) add to it themselves;
    the gradients of the others are added, and freed, when autograd has completed them.
    """

    def __init__(self, model: nn.Module, table: FlatTable) -> None:
        self._table = table
        self._flat: Tensor | None = None
        parameters = dict(model.named_parameters())
        for entry in table.entries:
            parameters[entry.name].register_post_accumulate_grad_hook(self._hook(entry))

    @contextmanager
    def collect(self, model: nn.Module, flat: Tensor) -> Iterator[Tensor]:
        """Add the gradients of every backward pass in this context to ``flat`` (see FlatTable)."""
        # The model is not kept: its hooks refer to this object, and the circle would outlive both.
        parameters = dict(model.named_parameters())
        self._flat = flat
        for entry in self._table.entries:
            setattr(parameters[entry.name], GRADIENT_SINK, self._table.view(flat, entry))
        try:
            yield flat
        finally:
            self._flat = None
            for parameter in parameters.values():
                delattr(parameter, GRADIENT_SINK)

    def _hook(self, entry: Entry) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if self._flat is not None and parameter.grad is not None:
                add_to(self._table.view(self._flat, entry), parameter.grad)
                parameter.grad = None

        return add
