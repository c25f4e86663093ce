"""What an algorithm is to the rest of rlayout: a dataflow and the pure functions of its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlayout.data.objective import Compute, Loss
from rlayout.errors import DataflowError
from rlayout.spec.dataflow import Dataflow, Kind
from rlayout.spec.sampling import Sampling


@dataclass(frozen=True)
class Algorithm:
    """The calls of one step, what they compute, and which weights their roles start from.

    Raises:
        DataflowError: a train call without a loss, a compute call without a function, a role without a
            source of weights, or one of these for something that the dataflow does not have.
    """

    dataflow: Dataflow
    losses: Mapping[str, Loss]
    """By the train call's name."""
    role_sources: Mapping[str, str]
    """Role -> section of the configuration that says which weights it starts from."""
    computes: Mapping[str, Compute] = field(default_factory=dict)
    """By the compute call's name."""

    def __post_init__(self) -> None:
        calls = self.dataflow.calls
        _same("losses", self.losses, (c.name for c in calls if c.kind is Kind.TRAIN), "train call")
        _same("computes", self.computes, (c.name for c in calls if c.kind is Kind.COMPUTE), "compute call")
        _same("role_sources", self.role_sources, self.dataflow.roles, "role")

    @property
    def frozen_roles(self) -> tuple[str, ...]:
        """Roles that keep the weights that they start from."""
        trained = self.dataflow.trained_roles
        return tuple(role for role in self.dataflow.roles if role not in trained)


class AlgorithmConfig(Protocol):
    """A frozen dataclass of an algorithm's settings, which checks itself at construction."""

    @property
    def name(self) -> str:
        """The algorithm's name in a configuration file."""
        ...

    def build(self, sampling: Sampling) -> Algorithm:
        """Return the algorithm for answers drawn as ``sampling`` says.

        Raises:
            ConfigError: the algorithm cannot learn from answers drawn so.
        """
        ...


def _same(what: str, given: Iterable[str], wanted: Iterable[str], noun: str) -> None:
    given, wanted = set(given), set(wanted)
    for name in sorted(wanted - given):
        raise DataflowError(f"algorithm: {what}: {noun} {name!r} is missing")
    for name in sorted(given - wanted):
        raise DataflowError(f"algorithm: {what}: the dataflow has no {noun} {name!r}")
