"""Execution plans: read, written, and refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.errors import PlanError
from rlayout.spec.cluster import Cluster
from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.layout import Layout, Placement
from rlayout.spec.plan import ExecutionPlan

FLOW = Dataflow(
    (
        Call("generate", Kind.GENERATE, role="actor", inputs=("prompts",), outputs=("tokens",)),
        Call("train", Kind.TRAIN, role="actor", inputs=("tokens",)),
    ),
    source=("prompts",),
)
CLUSTER = Cluster(num_nodes=1, devices_per_node=4)


def plain(**changes: Any) -> dict[str, Any]:
    train = {"devices": [0, 1], "layout": "d2", "micro_batch_tokens": 512}
    generate = {"devices": [2], "layout": "d1", "micro_batch_tokens": 512}
    return {"calls": {"generate": generate, "train": {**train, **changes}}}


@given(
    st.dictionaries(
        st.text("abcdef_", min_size=1),
        st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True),
        min_size=1,
    )
)
def test_a_plan_survives_its_file(meshes: dict[str, list[int]]) -> None:
    plan = ExecutionPlan(
        {name: Placement(tuple(mesh), Layout(dp=len(mesh)), 77) for name, mesh in meshes.items()}
    )
    assert ExecutionPlan.from_plain(plan.to_plain()) == plan


def test_a_fitting_plan_passes() -> None:
    plan = ExecutionPlan.from_plain(plain())
    plan.check(FLOW, CLUSTER)
    assert plan.meshes() == ((2,), (0, 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            plain(devices=[0, 1, 2]),
            r"plan: calls.train: layout d2 needs 2 devices, but the mesh \[0, 1, 2\] has 3",
        ),
        (plain(devices=[1, 1]), "name one device twice"),
        (plain(devices="0,1"), "calls.train.devices: expected a list of device numbers"),
        (plain(layout="p2t2"), "layout 'p2t2': expected replicas, tensor ranks"),
        (plain(layout="d0"), "layout 'd0': expected replicas"),
        (plain(micro_batch_tokens=0), "micro_batch_tokens must be at least 1"),
        (plain(micro_batch_tokens="many"), "expected a whole number, got 'many'"),
        (plain(device=[0]), "calls.train.device: unknown key. did you mean 'devices'"),
        ({"calls": {}}, "expected a mapping from call to placement"),
        ({"call": {}}, "plan.call: unknown key. did you mean 'calls'"),
        (None, "plan: expected a mapping"),
    ],
)
def test_a_wrong_file_is_refused(data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ExecutionPlan.from_plain(data)


def test_a_device_outside_of_the_cluster() -> None:
    plan = ExecutionPlan.from_plain(plain(devices=[3, 4]))
    with pytest.raises(
        PlanError, match=r"train.devices: device 4 is outside .* 0 to 3 \(cluster.nodes 1 x cluster.workers 4\)"
    ):
        plan.check(FLOW, CLUSTER)


def test_a_call_that_the_algorithm_does_not_have() -> None:
    data = plain()
    data["calls"]["trian"] = data["calls"]["train"]
    with pytest.raises(
        PlanError, match=r"calls.trian: the algorithm has no such model call. did you mean 'train'"
    ):
        ExecutionPlan.from_plain(data).check(FLOW, CLUSTER)


def test_a_call_without_placement() -> None:
    data = plain()
    del data["calls"]["generate"]
    with pytest.raises(PlanError, match=r"calls.generate: missing"):
        ExecutionPlan.from_plain(data).check(FLOW, CLUSTER)
