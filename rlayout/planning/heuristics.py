"""Execution plans by rule, without a search."""

from __future__ import annotations

from rlayout.spec.cluster import Cluster
from rlayout.spec.dataflow import Dataflow
from rlayout.spec.layout import Layout, Placement
from rlayout.spec.plan import ExecutionPlan


def colocated(dataflow: Dataflow, cluster: Cluster, *, micro_batch_tokens: int) -> ExecutionPlan:
    """Every model call on all devices of the cluster, one replica per device.

    Args:
        dataflow: the calls to place.
        cluster: the devices.
        micro_batch_tokens: upper bound of the tokens that one device computes at once.
    """
    devices = tuple(range(cluster.num_devices))
    placement = Placement(devices, Layout(dp=len(devices)), micro_batch_tokens)
    return ExecutionPlan({call.name: placement for call in dataflow.calls if call.kind.needs_model})
