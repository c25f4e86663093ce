"""The controller: issues the calls of a step to the workers, in one order, and follows the weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray

from rlayout.data.batch import Batch
from rlayout.data.objective import Compute, Loss, Statistic
from rlayout.errors import WeightVersionError, WorkerError
from rlayout.planning.transfer import holdings, plan_transfer
from rlayout.runtime.dispatch import deal_groups, mini_batches, row_cost
from rlayout.runtime.host import HOST
from rlayout.runtime.orders import CallOrder, CallReport, RoleOrder
from rlayout.runtime.reallocation import Receipt
from rlayout.runtime.session import Session, raise_failures, wait_for_all, worker_name
from rlayout.runtime.store import Piece, Rows, Store, assemble
from rlayout.runtime.usage import Usage
from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.layout import Placement
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.parameters import parameters
from rlayout.spec.plan import ExecutionPlan

PROGRESS_SECONDS = 0.5
ITEMSIZE = {"bfloat16": 2, "float32": 4}


class Watcher(Protocol):
    """Is told what the controller does, to show it."""

    def started(self, call: str) -> None: ...
    def progressed(self, call: str, finished: int, total: int) -> None: ...
    def ended(self, call: str, seconds: float) -> None: ...


@dataclass(frozen=True)
class Program:
    """A dataflow with its functions and the placement of its calls."""

    dataflow: Dataflow
    plan: ExecutionPlan
    losses: Mapping[str, Loss] = field(default_factory=dict)
    computes: Mapping[str, Compute] = field(default_factory=dict)


@dataclass
class StepResult:
    """What a step left behind."""

    step: int
    seconds: float = 0.0
    statistics: dict[str, dict[str, Statistic]] = field(default_factory=dict)
    """Per call."""
    usages: dict[str, dict[int, Usage]] = field(default_factory=dict)
    """Per call and device."""
    receipts: list[Receipt] = field(default_factory=list)
    store: Store = field(default_factory=Store)

    def fetch(self, keys: tuple[str, ...]) -> Batch:
        """Bring the values of ``keys`` of all rows to this process."""
        rows = self.store.rows_of(keys)
        pieces = ray.get([p.reference for p in self.store.pieces_for(rows, rows.ids, keys)])
        return assemble(pieces, rows.ids, rows.groups, keys)


@dataclass
class _Running:
    """A call in flight."""

    call: Call
    started: float
    reports: dict[Any, int]
    """Reference of the report -> device."""
    batches: dict[Any, Any]
    """Reference of the report -> reference of the batch."""
    receipts: dict[Any, int] = field(default_factory=dict)
    """Reference of a receipt of the reallocation that goes before the call -> device."""
    arrived: list[Receipt] = field(default_factory=list)
    shown: float = 0.0
    """When progress was last asked for."""

    @property
    def outstanding(self) -> dict[Any, int]:
        return {**self.receipts, **self.reports}


class Controller:
    """Runs dataflows on the workers of a session. One per stage of a run."""

    def __init__(self, session: Session, shapes: Mapping[str, ModelShape], seed: int) -> None:
        self._session = session
        self._shapes = shapes
        self._seed = seed
        self._versions: dict[str, dict[int, int]] = {}
        """Role -> device -> the weight version that the device holds."""
        self._homes: dict[str, Placement] = {}
        """Role -> where its newest weights come to be: the placement of its train call."""
        self._itemsizes: dict[str, int] = {}

    def load(self, orders: Mapping[str, RoleOrder], program: Program) -> None:
        """Put every role's weights on all devices that the plan runs it on; train meshes get optimizers.

        Whatever the workers held before is freed first.
        """
        self._session.on_all("drop_roles", what="free its models")
        self._session.on_all("make_groups", program.plan.meshes(), what="make process groups")
        waiting = {}
        for role, order in orders.items():
            placements = {c.name: program.plan[c.name] for c in program.dataflow.calls_of(role)}
            trains = [c.name for c in program.dataflow.calls_of(role) if c.kind is Kind.TRAIN]
            home = placements[trains[0]] if trains else next(iter(placements.values()))
            self._homes[role] = home
            self._itemsizes[role] = ITEMSIZE[order.dtype]
            devices = sorted({d for p in placements.values() for d in p.devices})
            self._versions[role] = dict.fromkeys(devices, 0)
            for device in devices:
                mesh = home.devices if trains and device in home.devices else None
                reference = self._session.workers[device].load_role.remote(order.on(mesh))
                waiting[reference] = f"{worker_name(device)} (role {role!r})"
        wait_for_all(waiting, limit=self._session.limits.start, what="load its model")

    def run(self, program: Program, rows: Batch, step: int, watcher: Watcher) -> StepResult:
        """Run all calls of ``program`` over ``rows`` of the dataset.

        Calls whose inputs are ready are issued at once, always in the order of the dataflow. A worker
        runs what it is sent first-in first-out, so no two workers wait for each other in another order.
        """
        result = StepResult(step)
        result.store.add(Piece(Rows.of(rows), rows.keys, ray.put(rows)))
        start = time.perf_counter()
        waiting = list(program.dataflow.order)
        running: list[_Running] = []
        done: set[str] = set()
        while waiting or running:
            for name in [n for n in waiting if done.issuperset(program.dataflow.predecessors(n))]:
                waiting.remove(name)
                watcher.started(name)
                running.append(self._issue(program, program.dataflow[name], result))
            for ended in self._collect(running, result, watcher):
                running.remove(ended)
                done.add(ended.call.name)
                watcher.ended(ended.call.name, time.perf_counter() - ended.started)
        result.seconds = time.perf_counter() - start
        return result

    def save(self, role: str, folder: Path, tokenizer: Any, end_tokens: Sequence[int] = ()) -> None:
        """Write a role's newest weights, its tokenizer and end tokens as a Hugging Face folder."""
        arguments = (role, folder, tokenizer, tuple(end_tokens))
        device = self._homes[role].devices[0]
        self._session.on_all("save_role", *arguments, what="save the weights", devices=[device])

    # -- issuing --------------------------------------------------------------------------------

    def _issue(self, program: Program, call: Call, result: StepResult) -> _Running:
        rows = result.store.rows_of(call.inputs)
        if not call.kind.needs_model:
            return self._issue_on_host(program, call, rows, result)
        placement = program.plan[call.name]
        running = _Running(call, time.perf_counter(), {}, {})
        version = self._bring_up_to_date(running, placement)
        costs = self._costs(call, rows, program.losses.get(call.name), result)
        dealt = self._deal(call, rows, costs, placement, result.step)
        for device, part in zip(placement.devices, dealt, strict=True):
            ids = [i for mini_batch in part for i in mini_batch]
            group_of = dict(zip(rows.ids, rows.groups, strict=True))
            order = CallOrder(
                call=call,
                step=result.step,
                version=version,
                seed=self._seed,
                micro_batch_tokens=placement.micro_batch_tokens,
                mini_batches=tuple(map(tuple, part)),
                groups={i: group_of[i] for i in ids},
                loss=program.losses.get(call.name),
            )
            pieces = [p.reference for p in result.store.pieces_for(rows, ids, call.inputs)]
            method = self._session.workers[device].execute.options(num_returns=2)
            report, batch = method.remote(order, *pieces)
            running.reports[report] = device
            running.batches[report] = batch
        return running

    def _issue_on_host(self, program: Program, call: Call, rows: Rows, result: StepResult) -> _Running:
        pieces = [p.reference for p in result.store.pieces_for(rows, rows.ids, call.inputs)]
        method = self._session.host.execute.options(num_returns=2)
        report, batch = method.remote(call, program.computes.get(call.name), rows, *pieces)
        return _Running(call, time.perf_counter(), {report: HOST}, {report: batch})

    def _deal(
        self, call: Call, rows: Rows, costs: Mapping[int, float], placement: Placement, step: int
    ) -> list[list[list[int]]]:
        """Per rank, per mini-batch, the row ids."""
        group = dict(zip(rows.ids, rows.groups, strict=True))
        parts: list[list[list[int]]] = [[] for _ in placement.devices]
        for ids in mini_batches(rows.ids, rows.groups, call.updates, self._seed, step):
            dealt = deal_groups([group[i] for i in ids], [costs[i] for i in ids], placement.layout.dp)
            for rank, indices in enumerate(dealt):
                parts[rank].append([ids[i] for i in indices])
        return parts

    def _costs(self, call: Call, rows: Rows, loss: Loss | None, result: StepResult) -> dict[int, float]:
        """Row id -> relative cost."""
        shape = self._shapes[str(call.role)]
        longer = 0
        if call.kind is Kind.GENERATE and call.sampling is not None:
            # How long an answer gets is unknown; every prompt may use all of its tokens.
            longer = call.samples_per_prompt * call.sampling.max_new_tokens
        costs = {i: row_cost(n + longer, shape) for i, n in zip(rows.ids, rows.lengths, strict=True)}
        if loss and loss.teaching_keys:
            known = result.fetch(loss.teaching_keys)
            idle = (~loss.teaches(known)).nonzero().flatten().tolist()
            costs |= dict.fromkeys((known.ids[i] for i in idle), 0.0)
        return costs

    # -- weights --------------------------------------------------------------------------------

    def _bring_up_to_date(self, running: _Running, placement: Placement) -> int:
        """Have the newest weights moved to the devices of a call, if need be; return their version.

        Nobody waits here: the workers receive the call behind the reallocation and run both in turn.
        """
        role = str(running.call.role)
        held = self._versions[role]
        newest = max(held.values())
        if all(held[device] == newest for device in placement.devices):
            return newest
        source = self._homes[role]
        shape = self._shapes[role]
        plan = plan_transfer(
            parameters(shape),
            holdings(shape, source),
            holdings(shape, placement),
            self._session.cluster.node_of,
            self._itemsizes[role],
        )
        for device in sorted({*source.devices, *placement.devices}):
            reference = self._session.workers[device].reallocate.remote(role, plan, newest)
            running.receipts[reference] = device
            held[device] = newest
        return newest

    # -- collecting -----------------------------------------------------------------------------

    def _collect(self, running: list[_Running], result: StepResult, watcher: Watcher) -> list[_Running]:
        """Wait until something happens; return the calls that have ended."""
        names = {
            ref: f"{worker_name(device)} in call {r.call.name!r}"
            for r in running
            for ref, device in r.outstanding.items()
        }
        ready, left = ray.wait(list(names), num_returns=1, timeout=0.5)
        what = f"step {result.step}"
        raise_failures({ref: names[ref] for ref in ready}, left, names, what)
        self._check_limits(running)
        for r in running:
            for reference in [ref for ref in ready if ref in r.receipts]:
                self._take_receipt(r, reference, result)
            for reference in [ref for ref in ready if ref in r.reports]:
                self._take_report(r, reference, result)
        self._show_progress(running, watcher)
        return [r for r in running if not r.outstanding]

    def _take_receipt(self, running: _Running, reference: Any, result: StepResult) -> None:
        del running.receipts[reference]
        running.arrived.append(ray.get(reference))
        if not running.receipts:
            check_receipts(running.arrived)
            result.receipts += running.arrived

    def _take_report(self, running: _Running, reference: Any, result: StepResult) -> None:
        device = running.reports.pop(reference)
        report: CallReport = ray.get(reference)
        call = running.call
        result.usages.setdefault(call.name, {})[device] = report.usage
        if report.statistics:
            result.statistics[call.name] = dict(report.statistics)
        if report.rows.ids:
            result.store.add(Piece(report.rows, report.keys, running.batches[reference]))
        if call.kind is Kind.TRAIN:
            self._versions[str(call.role)][device] += 1

    def _check_limits(self, running: list[_Running]) -> None:
        for r in running:
            if time.perf_counter() - r.started > self._session.limits.call:
                names = ", ".join(worker_name(d) for d in r.outstanding.values())
                raise WorkerError(
                    f"{names} did not finish call {r.call.name!r} within {self._session.limits.call:g} seconds"
                )

    def _show_progress(self, running: list[_Running], watcher: Watcher) -> None:
        for r in running:
            if r.call.kind is not Kind.GENERATE or time.perf_counter() - r.shown < PROGRESS_SECONDS:
                continue
            r.shown = time.perf_counter()
            workers = [self._session.workers[device] for device in r.reports.values()]
            references = [w.progress.options(concurrency_group="status").remote() for w in workers]
            ready, _ = ray.wait(references, num_returns=len(references), timeout=PROGRESS_SECONDS)
            if references and len(ready) == len(references):
                counts = ray.get(ready)
                watcher.progressed(r.call.name, sum(c[0] for c in counts), sum(c[1] for c in counts))


def check_receipts(receipts: list[Receipt]) -> None:
    """All devices of a reallocation must now hold the same bytes of the same version.

    Raises:
        WeightVersionError: they do not.
    """
    first = receipts[0]
    for receipt in receipts:
        if (receipt.version, receipt.digest) != (first.version, first.digest):
            raise WeightVersionError(
                f"after a reallocation of role {receipt.role!r} device {receipt.device} holds version "
                f"{receipt.version} with digest {receipt.digest}, but device {first.device} holds version "
                f"{first.version} with digest {first.digest}"
            )
