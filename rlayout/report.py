"""Tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlayout.spec.dataflow import Call, Dataflow
from rlayout.spec.plan import ExecutionPlan
from rlayout.spec.serialization import to_plain

if TYPE_CHECKING:  # they import transformers and Ray, which tables do not need
    from rlayout.run import Outcome
    from rlayout.setup import Setup


def outcome_report(outcome: Outcome) -> RenderableType:
    """What a run achieved and where it is."""
    parts: list[RenderableType] = []
    if outcome.accuracy:
        table = Table(title="Held-out greedy accuracy", box=box.SIMPLE)
        for column in ("moment", "accuracy", "95% interval", "problems"):
            table.add_column(column, justify="left" if column == "moment" else "right")
        for moment, estimate in outcome.accuracy.items():
            interval = f"{estimate.low:.1%} to {estimate.high:.1%}"
            table.add_row(moment, f"{estimate.mean:.1%}", interval, str(estimate.count))
        parts.append(table)
    lines = [f"run folder   {outcome.folder}"]
    if outcome.checkpoint:
        lines.append(f"checkpoint   {outcome.checkpoint}  (loads in transformers)")
    lines.append(f"time         {outcome.seconds:.0f} s")
    parts.append(_whole_lines("\n".join(lines)))
    return Group(*parts)


def setup_report(setup: Setup) -> RenderableType:
    """The resolved configuration, what was derived from it, the dataflow and the plan."""
    warnings = [Text(f"warning: {w}", style="yellow") for w in setup.warnings]
    return Group(
        _section("Configuration", to_plain(setup.config)),
        _section("Derived", setup.derived()),
        dataflow_table(setup.algorithm.dataflow),
        plan_table(setup.algorithm.dataflow, setup.plan),
        *warnings,
    )


def dataflow_table(dataflow: Dataflow) -> Table:
    """Every call with its keys and whom it waits for."""
    table = Table(title="Dataflow", title_justify="left", title_style="bold", box=box.SIMPLE)
    for column in ("call", "reads", "writes", "waits for"):
        table.add_column(column, overflow="fold")
    table.add_row("(dataset)", "", ", ".join(dataflow.source), "")
    for name in dataflow.order:
        call = dataflow[name]
        waits = ", ".join(dataflow.predecessors(name))
        table.add_row(name, ", ".join(call.inputs), ", ".join(call.outputs), waits)
    return table


def plan_table(dataflow: Dataflow, plan: ExecutionPlan) -> Table:
    """Every call with its place."""
    table = Table(title="Plan", title_justify="left", title_style="bold", box=box.SIMPLE)
    for column in ("call", "kind", "role", "devices", "layout", "micro-batch tokens"):
        table.add_column(column, overflow="fold")
    for name in dataflow.order:
        call = dataflow[name]
        table.add_row(name, call.kind.value, call.role or "", *_place(call, plan))
    return table


def samples_report(samples: list[dict[str, Any]]) -> RenderableType:
    """Sample answers with prompt, reward and verdict."""
    return Group(*[_sample(s) for s in samples])


def device_ranges(devices: Sequence[int]) -> str:
    """Devices in their order, runs of neighbours joined: ``0-3, 6``."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _place(call: Call, plan: ExecutionPlan) -> tuple[str, str, str]:
    if not call.kind.needs_model:
        return "host", "", ""
    placement = plan[call.name]
    return device_ranges(placement.devices), str(placement.layout), str(placement.micro_batch_tokens)


def _sample(sample: Mapping[str, Any]) -> Panel:
    verdict = f"reward {sample['reward']:g} ({sample['verdict']}), expected {sample['expected']}"
    body = f"{sample['question']}\n\n{sample['text']}\n\n{verdict}, {sample['tokens']} tokens"
    title = Text(f"{sample['stage']} step {sample['step']} row {sample['id']}")
    return Panel(Text(body), title=title)


def _section(title: str, data: Any) -> RenderableType:
    lines = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=76)
    return Group(Text(title, style="bold"), _whole_lines(lines))


def _whole_lines(text: str) -> Text:
    """Lines that are never broken, so that a path or a setting can be copied."""
    return Text(text, no_wrap=True, overflow="ignore")
