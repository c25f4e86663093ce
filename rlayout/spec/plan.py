"""The execution plan: a placement for every call that needs a model. Plain data, edited by hand, diffed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlayout.errors import PlanError, nearest
from rlayout.spec.cluster import Cluster
from rlayout.spec.dataflow import Dataflow, Kind
from rlayout.spec.layout import Layout, Placement


@dataclass(frozen=True)
class ExecutionPlan:
    """Placement of every model call, by the call's name."""

    placements: Mapping[str, Placement]

    def __getitem__(self, call: str) -> Placement:
        return self.placements[call]

    def meshes(self) -> tuple[tuple[int, ...], ...]:
        """The distinct sets of devices, in the order of their first call."""
        return tuple(dict.fromkeys(p.devices for p in self.placements.values()))

    def check(self, dataflow: Dataflow, cluster: Cluster) -> None:
        """Refuse a plan that does not fit.

        Raises:
            PlanError: a call is missing or unknown, a device lies outside the cluster, or a role is
                trained at two placements.
        """
        needed = {call.name for call in dataflow.calls if call.kind.needs_model}
        for name in self.placements:
            if name not in needed:
                raise PlanError(
                    f"plan: calls.{name}: the algorithm has no such model call. {nearest(name, needed)}"
                )
        for name in sorted(needed - set(self.placements)):
            raise PlanError(f"plan: calls.{name}: missing; the algorithm has this call and needs its placement")
        for name, placement in self.placements.items():
            for device in placement.devices:
                if not 0 <= device < cluster.num_devices:
                    raise PlanError(
                        f"plan: calls.{name}.devices: device {device} is outside the cluster, whose devices "
                        f"are 0 to {cluster.num_devices - 1} (cluster.nodes {cluster.num_nodes} x "
                        f"cluster.workers {cluster.devices_per_node})"
                    )
        for role in dataflow.trained_roles:
            homes = {self[c.name].devices for c in dataflow.calls_of(role) if c.kind is Kind.TRAIN}
            if len(homes) > 1:
                raise PlanError(
                    f"plan: role {role!r} is trained on different meshes {sorted(homes)}; choose one"
                )

    def to_plain(self) -> dict[str, Any]:
        """Plain data as the plan file holds it."""
        return {
            "calls": {
                name: {
                    "devices": list(p.devices),
                    "layout": str(p.layout),
                    "micro_batch_tokens": p.micro_batch_tokens,
                }
                for name, p in self.placements.items()
            }
        }

    @classmethod
    def from_plain(cls, data: Any) -> ExecutionPlan:
        """Read what ``to_plain`` wrote, or a hand-written file.

        Raises:
            PlanError: unknown or missing keys, or values that do not make a placement.
        """
        calls = _mapping(data, "plan", {"calls"})["calls"]
        if not isinstance(calls, Mapping) or not calls:
            raise PlanError("plan: calls: expected a mapping from call to placement")
        return cls({str(name): _placement(value, f"plan: calls.{name}") for name, value in calls.items()})


def _placement(data: Any, where: str) -> Placement:
    fields = _mapping(data, where, {"devices", "layout", "micro_batch_tokens"})
    devices = fields["devices"]
    if not isinstance(devices, list) or not all(type(d) is int for d in devices):
        raise PlanError(f"{where}.devices: expected a list of device numbers, got {devices!r}")
    tokens = fields["micro_batch_tokens"]
    if type(tokens) is not int:
        raise PlanError(f"{where}.micro_batch_tokens: expected a whole number, got {tokens!r}")
    try:
        return Placement(tuple(devices), Layout.parse(str(fields["layout"])), tokens)
    except (ValueError, PlanError) as error:
        raise PlanError(f"{where}: {error}") from error


def _mapping(data: Any, where: str, keys: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PlanError(f"{where}: expected a mapping with {', '.join(sorted(keys))}, got {data!r}")
    for key in data:
        if key not in keys:
            raise PlanError(f"{where}.{key}: unknown key. {nearest(str(key), keys)}")
    for key in sorted(keys - set(data)):
        raise PlanError(f"{where}.{key}: missing")
    return data
