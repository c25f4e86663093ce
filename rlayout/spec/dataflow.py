"""The calls of one step and the edges between them, which follow from the keys that they read and write."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from rlayout.errors import DataflowError, nearest
from rlayout.spec.sampling import Sampling


class Kind(Enum):
    """What a call does."""

    GENERATE = "generate"
    """Sample answers from a role's model."""
    INFER = "infer"
    """Compute log-probabilities (later: values, scores) with a role's model."""
    TRAIN = "train"
    """Update a role's weights."""
    REWARD = "reward"
    """Judge answers without a model, on CPU."""
    COMPUTE = "compute"
    """A pure function of small values of the whole batch (advantages), on CPU."""

    @property
    def needs_model(self) -> bool:
        return self in (Kind.GENERATE, Kind.INFER, Kind.TRAIN)


@dataclass(frozen=True)
class Call:
    """One call of a step.

    Attributes:
        name: unique in the dataflow.
        kind: what it does.
        role: the model that it runs on; None for reward and compute.
        inputs: keys that it reads.
        outputs: keys that it writes.
        samples_per_prompt: of a generate call: answers per prompt.
        sampling: of a generate call: how tokens are drawn; of an infer or train call: the distribution
            whose log-probabilities are wanted (None: the model's own, at temperature 1).
        updates: of a train call: into how many optimizer steps the batch is divided.
    """

    name: str
    kind: Kind
    role: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    samples_per_prompt: int = 1
    sampling: Sampling | None = None
    updates: int = 1

    def __post_init__(self) -> None:
        if self.kind.needs_model != (self.role is not None):
            need = "needs a role" if self.kind.needs_model else "runs without a model and takes no role"
            raise DataflowError(f"call {self.name!r} of kind {self.kind.value} {need}")


@dataclass(frozen=True)
class Dataflow:
    """Calls and the keys that the dataset provides.

    Raises:
        DataflowError: two producers of a key, a key that nobody produces, a cycle, two calls of one
            name; the message names the keys.
    """

    calls: tuple[Call, ...]
    source: tuple[str, ...]
    """Keys of the dataset's rows."""
    order: tuple[str, ...] = field(init=False)
    """Call names, every call after those that it waits for; ties in the order of ``calls``."""

    def __post_init__(self) -> None:
        names = [call.name for call in self.calls]
        for name in names:
            if names.count(name) > 1:
                raise DataflowError(f"two calls are named {name!r}")
        self._check_producers()
        object.__setattr__(self, "order", self._sorted())

    def __getitem__(self, name: str) -> Call:
        if name not in self.by_name:
            raise DataflowError(f"no call {name!r}. {nearest(name, self.by_name)}")
        return self.by_name[name]

    @cached_property
    def by_name(self) -> dict[str, Call]:
        return {call.name: call for call in self.calls}

    @cached_property
    def producer(self) -> dict[str, str | None]:
        """Key -> name of the call that writes it, None for the dataset."""
        made: dict[str, str | None] = dict.fromkeys(self.source)
        for call in self.calls:
            made.update(dict.fromkeys(call.outputs, call.name))
        return made

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles in the order of their first call."""
        return tuple(dict.fromkeys(call.role for call in self.calls if call.role is not None))

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return tuple(r for r in self.roles if any(c.kind is Kind.TRAIN for c in self.calls_of(r)))

    def calls_of(self, role: str) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.role == role)

    def predecessors(self, name: str) -> tuple[str, ...]:
        """Calls of the same step that ``name`` waits for.

        They are the producers of its inputs, and for a train call also the other calls of its role:
        those want the weights of before the update.
        """
        call = self.by_name[name]
        waits = {self.producer[key] for key in call.inputs}
        if call.kind is Kind.TRAIN:
            waits |= {c.name for c in self.calls if c.role == call.role and c.kind is not Kind.TRAIN}
        return tuple(c.name for c in self.calls if c.name in waits)

    def _check_producers(self) -> None:
        writers: dict[str, list[str]] = {key: ["the dataset"] for key in self.source}
        for call in self.calls:
            for key in call.outputs:
                writers.setdefault(key, []).append(f"call {call.name!r}")
        for key, who in writers.items():
            if len(who) > 1:
                raise DataflowError(f"key {key!r} is produced by {' and by '.join(who)}; one must rename it")
        for call in self.calls:
            for key in call.inputs:
                if key not in writers:
                    raise DataflowError(
                        f"call {call.name!r} reads {key!r}, which nobody produces. {nearest(key, writers)}"
                    )

    def _sorted(self) -> tuple[str, ...]:
        graph = {call.name: set(self.predecessors(call.name)) for call in self.calls}
        try:
            waves = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            raise DataflowError(self._describe_cycle(error.args[1])) from error
        del waves
        return tuple(_stable_order([call.name for call in self.calls], graph))

    def _describe_cycle(self, cycle: Iterable[str]) -> str:
        names = list(cycle)
        links = []
        for before, after in itertools.pairwise(names):
            keys = [k for k in self.by_name[after].inputs if self.producer[k] == before]
            links.append(
                f"{after!r} waits for {before!r} through {', '.join(map(repr, keys)) or 'its weights'}"
            )
        return f"the calls wait for each other in a circle: {'; '.join(links)}"


def _stable_order(names: list[str], waits: dict[str, set[str]]) -> list[str]:
    done: list[str] = []
    while len(done) < len(names):
        done.append(next(n for n in names if n not in done and waits[n] <= set(done)))
    return done
