"""Tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from rlayout.run import Outcome
from rlayout.setup import Setup, describe
from rlayout.spec.dataflow import Call, Dataflow
from rlayout.spec.plan import ExecutionPlan
from rlayout.spec.serialization import to_plain


def outcome_table(outcome: Outcome) -> RenderableType:
    """What a run achieved and where it is."""
    parts: list[RenderableType] = []
    if outcome.accuracy:
        table = Table(title="Held-out greedy accuracy")
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
    parts.append(Text("\n".join(lines)))
    return Group(*parts)


def setup_report(setup: Setup) -> RenderableType:
    """The resolved configuration, what was derived from it, the dataflow and the plan."""
    warnings = [Text(f"warning: {w}", style="yellow") for w in setup.warnings]
    return Group(
        Panel(_yaml(to_plain(setup.config)), title="configuration"),
        Panel(_yaml(describe(setup)), title="derived"),
        dataflow_table(setup.algorithm.dataflow, setup.plan),
        *warnings,
    )


def dataflow_table(dataflow: Dataflow, plan: ExecutionPlan) -> Table:
    """Every call with its keys, whom it waits for and where it runs."""
    table = Table(title="Dataflow and plan")
    for column in ("call", "kind", "role", "reads", "writes", "waits for", "devices", "layout"):
        table.add_column(column)
    table.add_row("(dataset)", "", "", "", ", ".join(dataflow.source), "", "", "")
    for name in dataflow.order:
        call = dataflow[name]
        table.add_row(*_call_cells(call, dataflow), *_place_cells(call, plan))
    return table


def samples_report(samples: list[dict[str, Any]]) -> RenderableType:
    """Sample answers with prompt, reward and verdict."""
    return Group(*[_sample(s) for s in samples])


def _call_cells(call: Call, dataflow: Dataflow) -> tuple[str, ...]:
    waits = ", ".join(dataflow.predecessors(call.name)) or "-"
    return call.name, call.kind.value, call.role or "-", ", ".join(call.inputs), ", ".join(call.outputs), waits


def _place_cells(call: Call, plan: ExecutionPlan) -> tuple[str, str]:
    if not call.kind.needs_model:
        return "host", "-"
    placement = plan[call.name]
    return ",".join(map(str, placement.devices)), str(placement.layout)


def _sample(sample: Mapping[str, Any]) -> Panel:
    verdict = f"reward {sample['reward']:g} ({sample['verdict']}), expected {sample['expected']}"
    body = f"{sample['question']}\n\n{sample['text']}\n\n{verdict}, {sample['tokens']} tokens"
    return Panel(Text(body), title=f"{sample['stage']} step {sample['step']} row {sample['id']}")


def _yaml(data: Any) -> Syntax:
    return Syntax(yaml.safe_dump(data, sort_keys=False), "yaml", background_color="default")
