"""Which device sends which part of which parameter to whom, when weights change their placement.

A pure function of two placements. It intersects the boxes that devices hold with the boxes that devices
need, so that a new way to split a model changes ``held_boxes`` alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rlayout.errors import PlanError
from rlayout.planning.boxes import Box, intersect, numel, whole
from rlayout.spec.layout import Placement
from rlayout.spec.parameters import Parameter


@dataclass(frozen=True)
class Move:
    """One device sends a box of a parameter to another device.

    Attributes:
        parameter: its name.
        box: the part, in indices of the whole tensor.
        source: device that sends.
        destination: device that receives; never the source.
    """

    parameter: str
    box: Box
    source: int
    destination: int


@dataclass(frozen=True)
class TransferPlan:
    """All moves of one reallocation.

    Attributes:
        moves: in the order of the parameters, then of the destinations: every device takes part early
            and throughout.
        itemsize: bytes per element.
        minimum: destination device -> bytes that it needs and does not hold, the least that can move.
    """

    moves: tuple[Move, ...]
    itemsize: int
    minimum: Mapping[int, int]

    @property
    def bytes_minimum(self) -> int:
        return sum(self.minimum.values())

    @property
    def bytes_moved(self) -> int:
        return sum(self.sent.values())

    def bytes_needed(self, device: int) -> int:
        """Bytes that ``device`` needs and does not hold."""
        return self.minimum.get(device, 0)

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes by sending device."""
        return self._bytes_by(lambda move: move.source)

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes by receiving device."""
        return self._bytes_by(lambda move: move.destination)

    def _bytes_by(self, device_of: Callable[[Move], int]) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for move in self.moves:
            found[device_of(move)] += numel(move.box) * self.itemsize
        return dict(found)


def held_boxes(parameter: Parameter, placement: Placement, device: int) -> tuple[Box, ...]:
    """Parts of ``parameter`` that ``device`` holds under ``placement``; they do not overlap.

    The boxes of any two devices are equal or disjoint.
    """
    return (whole(parameter.shape),) if device in placement.devices else ()


def plan_transfer(
    parameters: tuple[Parameter, ...],
    source: Placement,
    destination: Placement,
    node_of: Callable[[int], int],
    itemsize: int,
) -> TransferPlan:
    """Give every device of ``destination`` what it needs and does not hold, and nothing more.

    Of the devices that hold a box, one on the receiver's node sends it if there is one, else any; among
    these the one that sends least so far, large boxes first. So where every source device holds the whole
    model, none sends more than the larger of two fair shares, plus one parameter: all bytes over all
    senders, and what receivers on its node need over the senders on its node.

    Args:
        parameters: the model's table.
        source: where the weights are.
        destination: where they are needed.
        node_of: node of a device.
        itemsize: bytes per element.

    Raises:
        PlanError: ``source`` does not hold all of a parameter.
    """
    wanted = [
        want for parameter in parameters for want in _missing_pieces(parameter, source, destination, node_of)
    ]
    senders = _choose_senders(wanted)
    return TransferPlan(
        moves=tuple(
            Move(want.parameter, want.box, sender, want.receiver)
            for want, sender in zip(wanted, senders, strict=True)
        ),
        itemsize=itemsize,
        minimum={
            device: itemsize * sum(_numel_missing(p, source, destination, device) for p in parameters)
            for device in destination.devices
        },
    )


@dataclass(frozen=True)
class _Want:
    """A box that a device lacks, and who may send it."""

    parameter: str
    box: Box
    receiver: int
    senders: tuple[int, ...]
    local: bool
    """Whether the senders are on the receiver's node."""


def _missing_pieces(
    parameter: Parameter, source: Placement, destination: Placement, node_of: Callable[[int], int]
) -> list[_Want]:
    """Boxes of ``parameter`` that devices of ``destination`` lack, cut as ``source`` holds them."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for device in source.devices:
        for box in held_boxes(parameter, source, device):
            holders[box].append(device)
    wants = []
    for receiver in destination.devices:
        for needed in held_boxes(parameter, destination, receiver):
            found = 0
            for held, devices in holders.items():
                piece = intersect(needed, held)
                if piece is None:
                    continue
                found += numel(piece)
                if receiver not in devices:
                    near = tuple(d for d in devices if node_of(d) == node_of(receiver))
                    wants.append(_Want(parameter.name, piece, receiver, near or tuple(devices), bool(near)))
            if found != numel(needed):
                raise PlanError(
                    f"transfer: parameter {parameter.name}: devices {list(source.devices)} hold {found} of the "
                    f"{numel(needed)} elements that device {receiver} needs"
                )
    return wants


def _choose_senders(wants: list[_Want]) -> list[int]:
    """Choose a sender for each want, in their order."""
    # A piece that only a node's own devices may send is placed before those that anyone may: the latter
    # then even out what the former left uneven. Within each, longest processing time first (Graham 1969).
    order = sorted(range(len(wants)), key=lambda i: (not wants[i].local, -numel(wants[i].box)))
    load: dict[int, int] = defaultdict(int)
    chosen: dict[int, int] = {}
    for i in order:
        chosen[i] = min(wants[i].senders, key=lambda device: load[device])
        load[chosen[i]] += numel(wants[i].box)
    return [chosen[i] for i in range(len(wants))]


def _numel_missing(parameter: Parameter, source: Placement, destination: Placement, device: int) -> int:
    """Elements that ``device`` needs and does not hold, without regard to who could send them."""
    held = held_boxes(parameter, source, device)
    missing = 0
    for needed in held_boxes(parameter, destination, device):
        common = (intersect(needed, box) for box in held)
        missing += numel(needed) - sum(numel(box) for box in common if box is not None)
    return missing
