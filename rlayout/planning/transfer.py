"""Which device sends which part of which parameter to whom, when weights change their placement.

A pure function of what devices hold and what they need. It intersects boxes and knows no layout, so any
split of a model goes to any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rlayout.errors import PlanError
from rlayout.spec.boxes import Box, intersect, numel
from rlayout.spec.layout import Placement
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import Parameter, parameters
from rlayout.spec.sharding import part_of

Holdings = Mapping[int, Mapping[str, Box]]
"""Device -> parameter -> the part of it that the device holds; those of two devices are equal or disjoint."""


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


def holdings(shape: ModelShape, placement: Placement) -> Holdings:
    """What the devices of ``placement`` hold of a model."""
    found: dict[int, dict[str, Box]] = {}
    table = parameters(shape)
    for index, device in enumerate(placement.devices):
        part = part_of(shape, placement.layout, placement.layout.rank(index))
        boxes = ((parameter.name, part.box(parameter)) for parameter in table)
        found[device] = {name: box for name, box in boxes if box is not None}
    return found


def plan_transfer(
    table: tuple[Parameter, ...],
    source: Holdings,
    destination: Holdings,
    node_of: Callable[[int], int],
    itemsize: int,
) -> TransferPlan:
    """Give every device of ``destination`` what it needs and does not hold, and nothing more.

    Of the devices that hold a box, one on the receiver's node sends it if there is one, else any; among
    these the one that sends least so far, large boxes first. So where every source device holds the whole
    model, none sends more than the larger of two fair shares, plus one parameter: all bytes over all
    senders, and what receivers on its node need over the senders on its node.

    Args:
        table: the model's parameters.
        source: where the weights are.
        destination: where they are needed.
        node_of: node of a device.
        itemsize: bytes per element.

    Raises:
        PlanError: ``source`` does not hold all of a parameter.
    """
    wanted = [want for p in table for want in _missing_pieces(p, source, destination, node_of)]
    senders = _choose_senders(wanted)
    return TransferPlan(
        moves=tuple(
            Move(want.parameter, want.box, sender, want.receiver)
            for want, sender in zip(wanted, senders, strict=True)
        ),
        itemsize=itemsize,
        minimum={
            device: itemsize * sum(_numel_missing(name, box, source, device) for name, box in boxes.items())
            for device, boxes in destination.items()
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
    parameter: Parameter, source: Holdings, destination: Holdings, node_of: Callable[[int], int]
) -> list[_Want]:
    """Boxes of ``parameter`` that devices of ``destination`` lack, cut as ``source`` holds them."""
    name = parameter.name
    holders: dict[Box, list[int]] = defaultdict(list)
    for device, boxes in source.items():
        if name in boxes:
            holders[boxes[name]].append(device)
    wants = []
    for receiver, boxes in destination.items():
        if name not in boxes:
            continue
        found = 0
        for held, devices in holders.items():
            piece = intersect(boxes[name], held)
            if piece is None:
                continue
            found += numel(piece)
            if receiver not in devices:
                near = tuple(d for d in devices if node_of(d) == node_of(receiver))
                wants.append(_Want(name, piece, receiver, near or tuple(devices), bool(near)))
        if found != numel(boxes[name]):
            raise PlanError(
                f"transfer: parameter {name}: devices {list(source)} hold {found} of the "
                f"{numel(boxes[name])} elements that device {receiver} needs"
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


def _numel_missing(parameter: str, needed: Box, source: Holdings, device: int) -> int:
    """Elements that ``device`` needs and does not hold, without regard to who could send them."""
    held = source.get(device, {}).get(parameter)
    common = None if held is None else intersect(needed, held)
    return numel(needed) - (0 if common is None else numel(common))
