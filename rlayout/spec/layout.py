"""How a model is split over a set of devices."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlayout.errors import PlanError


@dataclass(frozen=True)
class Rank:
    """A device's place in a layout, from 0 in each direction."""

    data: int
    stage: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """``dp`` replicas of a pipeline of ``pp`` stages, each of them split over ``tp`` devices.

    Short form: ``d4t2p3``; a letter that is not there means 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def num_devices(self) -> int:
        return self.dp * self.tp * self.pp

    def rank(self, index: int) -> Rank:
        """The place of the ``index``-th device of a mesh.

        Neighbours in the mesh are tensor ranks, which talk most, then stages, then replicas.
        """
        return Rank(index // (self.tp * self.pp), index // self.tp % self.pp, index % self.tp)

    def index(self, rank: Rank) -> int:
        """The inverse of ``rank``."""
        return (rank.data * self.pp + rank.stage) * self.tp + rank.tensor

    def __str__(self) -> str:
        tensor = f"t{self.tp}" if self.tp > 1 else ""
        return f"d{self.dp}{tensor}{f'p{self.pp}' if self.pp > 1 else ''}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the short form.

        Raises:
            PlanError: ``text`` is not of that form, or a number in it is not at least 1.
        """
        match = re.fullmatch(r"(?:d([1-9][0-9]*))?(?:t([1-9][0-9]*))?(?:p([1-9][0-9]*))?", text)
        if not match or not text:
            raise PlanError(
                f"layout {text!r}: expected replicas, tensor ranks and pipeline stages as dNtNpN, for instance "
                "d2, d1t2 or d2t2p3"
            )
        dp, tp, pp = (int(number or 1) for number in match.groups())
        return cls(dp=dp, tp=tp, pp=pp)


@dataclass(frozen=True)
class Placement:
    """Where and how one call runs.

    Attributes:
        devices: the mesh: device indices in the order of the layout's ranks (see ``Layout.rank``).
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

    def rank_of(self, device: int) -> Rank | None:
        """The place of ``device`` in the layout, or None outside of the mesh."""
        return self.layout.rank(self.devices.index(device)) if device in self.devices else None
