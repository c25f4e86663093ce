"""The machines of a run: nodes with devices. A device is named by one index over the whole cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]
"""What models compute in."""


@dataclass(frozen=True)
class Cluster:
    """``num_nodes`` nodes of ``devices_per_node`` devices each; devices are numbered node by node."""

    num_nodes: int
    devices_per_node: int
    device_kind: DeviceKind = "cpu"

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise ValueError(
                f"a cluster needs at least one node and one device, got {self.num_nodes} nodes of "
                f"{self.devices_per_node} devices"
            )

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        return device // self.devices_per_node
