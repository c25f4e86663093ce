"""What the controller sends to a worker and what comes back: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlayout.data.objective import Loss, Statistic
from rlayout.runtime.store import Rows
from rlayout.runtime.usage import Usage
from rlayout.spec.cluster import Dtype
from rlayout.spec.dataflow import Call
from rlayout.spec.optimization import Optimization


@dataclass(frozen=True)
class RoleOrder:
    """Which model a role is, and what the worker needs to hold it."""

    role: str
    source: str
    dtype: Dtype
    train_mesh: tuple[int, ...] | None
    """The devices that train the role, if this worker is one of them."""
    optimization: Optimization | None
    total_updates: int

    def on(self, train_mesh: tuple[int, ...] | None) -> RoleOrder:
        """The same role for a device of ``train_mesh``, or for one that does not train it."""
        return replace(self, train_mesh=train_mesh)


@dataclass(frozen=True)
class CallOrder:
    """One worker's part of one call."""

    call: Call
    step: int
    version: int
    """The weight version that the call must use (of a train call: that it starts from)."""
    seed: int
    micro_batch_tokens: int
    mini_batches: tuple[tuple[int, ...], ...]
    """Row ids of this worker, per optimizer step (one list for other calls); may be empty."""
    groups: Mapping[int, int]
    """Group of each of these rows."""
    loss: Loss | None = None


@dataclass(frozen=True)
class CallReport:
    """What a worker says about its part, beside the batch in the object store."""

    device: int
    rows: Rows
    keys: tuple[str, ...]
    usage: Usage
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    """Figures of the whole mesh, the same on each of its devices."""
