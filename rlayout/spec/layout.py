"""How a model is split over a set of devices."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlayout.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Data parallelism over ``dp`` replicas. Short form: ``d4``."""

    dp: int

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ValueError(f"dp must be at least 1, got {self.dp}")

    @property
    def num_devices(self) -> int:
        return self.dp

    def __str__(self) -> str:
        return f"d{self.dp}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the short form.

        Raises:
            PlanError: ``text`` is not of the form ``dN`` with N at least 1.
        """
        match = re.fullmatch(r"d([1-9][0-9]*)", text)
        if not match:
            raise PlanError(f"layout {text!r}: expected dN, for instance d2")
        return cls(dp=int(match[1]))


@dataclass(frozen=True)
class Placement:
    """Where and how one call runs.

    Attributes:
        devices: the mesh: device indices in the order of the layout's ranks.
        layout: the split over these devices.
        micro_batch_tokens: upper bound of the tokens that one device computes at once (training and
            inference); a single longer sequence makes a micro-batch of its own.
    """

    devices: tuple[int, ...]
    layout: Layout
    micro_batch_tokens: int

    def __post_init__(self) -> None:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"devices {list(self.devices)} name one device twice")
        if self.layout.num_devices != len(self.devices):
            raise ValueError(
                f"layout {self.layout} needs {self.layout.num_devices} devices, "
                f"but the mesh {list(self.devices)} has {len(self.devices)}"
            )
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {self.micro_batch_tokens}")
