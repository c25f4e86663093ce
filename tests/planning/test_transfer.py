from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlayout.errors import PlanError
from rlayout.planning import transfer
from rlayout.planning.boxes import Box, numel, whole
from rlayout.planning.transfer import Move, TransferPlan, plan_transfer
from rlayout.spec.layout import Layout, Placement
from rlayout.spec.parameters import Parameter

ITEMSIZE = 2
Element = tuple[str, tuple[int, ...]]


def table(*shapes: tuple[int, ...]) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"p{i}", f"hf.p{i}", shape, None) for i, shape in enumerate(shapes))


def on(*devices: int) -> Placement:
    return Placement(devices, Layout(dp=len(devices)), 1)


def nodes_of(size: int) -> Callable[[int], int]:
    return lambda device: device // size


PARAMETERS = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6).map(
    lambda shapes: table(*shapes)
)
PLACEMENT = st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True).map(lambda d: on(*d))
NODE_OF = st.sampled_from([1, 2, 3, 4, 12]).map(nodes_of)


def elements(parameter: str, box: Box) -> set[Element]:
    return {(parameter, index) for index in itertools.product(*(range(a, b) for a, b in box))}


def held_elements(parameters: tuple[Parameter, ...], placement: Placement, device: int) -> set[Element]:
    return {
        element
        for parameter in parameters
        for box in transfer.held_boxes(parameter, placement, device)
        for element in elements(parameter.name, box)
    }


def check_exact(
    plan: TransferPlan, parameters: tuple[Parameter, ...], source: Placement, destination: Placement
) -> None:
    """Element by element: senders hold what they send, receivers get what they lack, once."""
    arrived: dict[int, Counter[Element]] = defaultdict(Counter)
    for move in plan.moves:
        sent = elements(move.parameter, move.box)
        assert sent <= held_elements(parameters, source, move.source)
        arrived[move.destination].update(sent)
    assert set(arrived) <= set(destination.devices)
    for device in destination.devices:
        missing = held_elements(parameters, destination, device) - held_elements(parameters, source, device)
        assert arrived[device] == Counter(missing)
        assert plan.bytes_needed(device) == plan.received.get(device, 0) == len(missing) * ITEMSIZE
    assert plan.bytes_moved == plan.bytes_minimum == sum(plan.sent.values())


def test_by_hand():
    parameters = table((2, 3), (4,))
    plan = plan_transfer(parameters, on(0), on(0, 1), nodes_of(2), itemsize=4)
    assert plan.moves == (Move("p0", ((0, 2), (0, 3)), 0, 1), Move("p1", ((0, 4),), 0, 1))
    assert plan.bytes_moved == plan.bytes_minimum == 40
    assert plan.sent == {0: 40}
    assert plan.received == {1: 40}
    assert (plan.bytes_needed(0), plan.bytes_needed(1), plan.bytes_needed(9)) == (0, 40, 0)


def test_nothing_moves_to_where_it_is():
    plan = plan_transfer(table((3,)), on(2, 0, 1), on(1, 2), nodes_of(1), itemsize=4)
    assert plan.moves == ()
    assert plan.bytes_moved == plan.bytes_minimum == 0


def test_the_same_node_sends():
    # devices 0 and 1 on node 0, 2 and 3 on node 1, 4 on node 2
    plan = plan_transfer(table((3,)), on(0, 2), on(1, 3, 4), nodes_of(2), itemsize=4)
    senders = {move.destination: move.source for move in plan.moves}
    assert (senders[1], senders[3]) == (0, 2)
    assert senders[4] in (0, 2)


def test_a_load_that_one_node_must_carry_is_evened_out_by_the_others():
    # Device 0 must serve 1, 2 and 3 on its node; 4 serves node 2, where nobody holds anything.
    plan = plan_transfer(table((5,)), on(0, 4), on(8, 1, 2, 3), nodes_of(4), itemsize=1)
    assert plan.sent == {0: 15, 4: 5}


def test_replicas_share_the_sending():
    # largest first: 5 to one, 3 and then 2 to the other, in the order of the table 2, 5, 3
    plan = plan_transfer(table((2,), (5,), (3,)), on(0, 1), on(2), nodes_of(8), itemsize=1)
    assert [move.source for move in plan.moves] == [1, 0, 1]
    assert plan.sent == {0: 5, 1: 5}


@given(PARAMETERS, PLACEMENT, PLACEMENT, NODE_OF)
def test_exact_and_minimal(parameters, source, destination, node_of):
    plan = plan_transfer(parameters, source, destination, node_of, ITEMSIZE)
    check_exact(plan, parameters, source, destination)
    assert plan == plan_transfer(parameters, source, destination, node_of, ITEMSIZE)


@given(PARAMETERS, PLACEMENT, PLACEMENT, NODE_OF)
def test_nobody_sends_more_than_a_fair_share(parameters, source, destination, node_of):
    plan = plan_transfer(parameters, source, destination, node_of, ITEMSIZE)
    largest = ITEMSIZE * max(prod(parameter.shape) for parameter in parameters)
    receivers = set(destination.devices) - set(source.devices)
    model = ITEMSIZE * sum(prod(parameter.shape) for parameter in parameters)
    fair = model * len(receivers) / len(source.devices)
    for device, load in plan.sent.items():
        neighbours = sum(node_of(d) == node_of(device) for d in receivers)
        senders = sum(node_of(d) == node_of(device) for d in source.devices)
        assert load <= max(fair, model * neighbours / senders) + largest


@given(PARAMETERS, PLACEMENT, PLACEMENT, NODE_OF)
def test_no_byte_crosses_nodes_without_need(parameters, source, destination, node_of):
    plan = plan_transfer(parameters, source, destination, node_of, ITEMSIZE)
    holding_nodes = {node_of(device) for device in source.devices}
    for move in plan.moves:
        if node_of(move.destination) in holding_nodes:
            assert node_of(move.source) == node_of(move.destination)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 3))
def test_largest_sender_against_all_assignments(sizes: list[int], senders: int):
    parameters = table(*((size,) for size in sizes))
    plan = plan_transfer(parameters, on(*range(senders)), on(senders), nodes_of(12), itemsize=1)
    best = min(
        max(sum(size for size, s in zip(sizes, choice, strict=True) if s == sender) for sender in choice)
        for choice in itertools.product(range(senders), repeat=len(sizes))
    )
    # Longest processing time first is within 4/3 - 1/(3 m) of the optimum (Graham 1969, theorem 2).
    assert best <= max(plan.sent.values()) <= best * (4 / 3 - 1 / (3 * senders)) + 1e-9


@st.composite
def splits(draw: st.DrawFn, parameters: tuple[Parameter, ...], ranks: int) -> list[dict[str, Box]]:
    """A box of each parameter per rank: an uneven cut along one dimension, some ranks being replicas."""
    boxes: list[dict[str, Box]] = [{} for _ in range(ranks)]
    for parameter in parameters:
        full = whole(parameter.shape)
        axis = draw(st.integers(0, len(full) - 1)) if full else None
        size = parameter.shape[axis] if axis is not None else 1
        shards = draw(st.integers(1, min(size, ranks)))
        inner = draw(
            st.lists(st.integers(1, max(1, size - 1)), min_size=shards - 1, max_size=shards - 1, unique=True)
        )
        edges = [0, *sorted(inner), size]
        for rank in range(ranks):
            span = (edges[rank % shards], edges[rank % shards + 1])
            boxes[rank][parameter.name] = tuple(
                span if dimension == axis else whole_span for dimension, whole_span in enumerate(full)
            )
    return boxes


@settings(deadline=None)
@given(st.data(), PARAMETERS, PLACEMENT, PLACEMENT, NODE_OF)
def test_splits_would_change_held_boxes_alone(data, parameters, source, destination, node_of):
    """Under any split of the tensors over the devices, uneven ones included, the plan is exact and minimal."""
    held = {
        id(placement): dict(
            zip(placement.devices, data.draw(splits(parameters, len(placement.devices))), strict=True)
        )
        for placement in (source, destination)
    }

    def split_boxes(parameter: Parameter, placement: Placement, device: int) -> tuple[Box, ...]:
        boxes = held[id(placement)].get(device)
        return (boxes[parameter.name],) if boxes is not None else ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "held_boxes", split_boxes)
        plan = plan_transfer(parameters, source, destination, node_of, ITEMSIZE)
        check_exact(plan, parameters, source, destination)
        assert all(numel(move.box) > 0 for move in plan.moves)


def test_a_source_that_lacks_a_part_is_refused(monkeypatch: pytest.MonkeyPatch):
    source = on(0, 1)

    def half(parameter: Parameter, placement: Placement, device: int) -> tuple[Box, ...]:
        del parameter
        return (((0, 2),),) if placement is source else (((0, 4),),)

    monkeypatch.setattr(transfer, "held_boxes", half)
    with pytest.raises(PlanError, match=r"p0: devices \[0, 1\] hold 2 of the 4 elements that device 2 needs"):
        plan_transfer(table((4,)), source, on(2), nodes_of(1), ITEMSIZE)


def test_planning_a_transfer_needs_no_torch():
    code = (
        "import sys, rlayout.planning.transfer, rlayout.planning.heuristics; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
