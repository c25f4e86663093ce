import pytest

from rlayout.planning.heuristics import colocated
from rlayout.spec.cluster import Cluster
from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.layout import Layout, Placement

FLOW = Dataflow(
    (
        Call("generate", Kind.GENERATE, role="actor", inputs=("prompts",), outputs=("tokens",)),
        Call("reward", Kind.REWARD, inputs=("tokens",), outputs=("rewards",)),
        Call("train", Kind.TRAIN, role="actor", inputs=("tokens", "rewards")),
    ),
    source=("prompts",),
)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 3), (2, 4)])
def test_colocated_places_every_model_call_on_all_devices(nodes: int, devices: int):
    cluster = Cluster(nodes, devices)
    plan = colocated(FLOW, cluster, micro_batch_tokens=512)
    plan.check(FLOW, cluster)
    count = nodes * devices
    expected = Placement(tuple(range(count)), Layout(dp=count), 512)
    assert plan.placements == {"generate": expected, "train": expected}
