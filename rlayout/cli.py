"""Train language models with reinforcement learning, as a plan says."""

from __future__ import annotations

import functools
import importlib
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from rlayout.config import Config, load_config
from rlayout.display import Display
from rlayout.errors import ConfigError, RlayoutError
from rlayout.report import outcome_report, samples_report, setup_report
from rlayout.run_folder import is_run, last_checkpoint, read_records

if TYPE_CHECKING:
    from rlayout.setup import Setup

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()

P = ParamSpec("P")


def friendly(command: Callable[P, None]) -> Callable[P, None]:
    """An error of rlayout's own is one message, not a traceback; Ctrl-C ends in order."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except RlayoutError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as stop:
            for number in (signal.SIGINT, signal.SIGTERM):  # once is enough
                signal.signal(number, signal.SIG_IGN)
            print("stopped: the workers are ended, checkpoints already written are kept", file=sys.stderr)
            raise typer.Exit(130) from stop

    return wrapped


ConfigPath = Annotated[Path, typer.Argument(help="A configuration file.")]
ConfigOrRun = Annotated[
    Path, typer.Argument(help="A configuration file, or a run's folder: its newest checkpoint is used.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value settings over those of the file, e.g. steps=10")
]


@app.command()
@friendly
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a model."""
    setup = _prepared(load_config(config, overrides or []))
    with Display(console) as display:
        outcome = _late("rlayout.run").train(setup, config.stem, display)
    console.print(outcome_report(outcome), crop=False)


@app.command()
@friendly
def evaluate(config: ConfigOrRun, overrides: Overrides = None) -> None:
    """Measure greedy accuracy on the held-out problems."""
    setup = _prepared(_config_of(config, overrides))
    name = config.name if is_run(config) else config.stem
    with Display(console) as display:
        outcome = _late("rlayout.run").evaluate(setup, f"{name}-evaluation", display)
    console.print(outcome_report(outcome), crop=False)


@app.command()
@friendly
def generate(
    config: ConfigOrRun,
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A question; may be given several times.")] = None,
    samples: Annotated[int, typer.Option(help="Answers per question.", min=1)] = 1,
    greedy: Annotated[bool, typer.Option(help="Take the most probable token at every place.")] = False,
) -> None:
    """Answer questions with the configured model."""
    if not prompt:
        raise ConfigError("generate: give at least one question, e.g. --prompt 'What is 2 + 3?'")
    setup = _prepared(_config_of(config, overrides))
    with Display(console) as display:
        answers = _late("rlayout.run").generate(setup, prompt, samples, greedy, display)
    for question, texts in zip(prompt, answers, strict=True):
        console.rule(Text(question))
        for text in texts:
            console.print(Text(text), soft_wrap=True)


@app.command()
@friendly
def show(
    target: ConfigOrRun,
    overrides: Overrides = None,
    samples: Annotated[bool, typer.Option("--samples", help="Of a run: sample answers.")] = False,
    last: Annotated[int, typer.Option(help="How many sample answers.", min=1)] = 10,
) -> None:
    """Show the resolved configuration, the dataflow and the plan; or sample answers of a run."""
    if samples:
        if not is_run(target):
            raise ConfigError(f"show --samples: {target} is not the folder of a run (it has no config.yaml)")
        console.print(samples_report(read_records(target / "samples.jsonl")[-last:]))
        return
    config = _as_run(target, overrides or []) if is_run(target) else load_config(target, overrides or [])
    console.print(setup_report(_late("rlayout.setup").prepare(config)), crop=False)


def _config_of(target: Path, overrides: list[str] | None) -> Config:
    """Of a run: its configuration with its newest checkpoint."""
    given = overrides or []
    if not is_run(target):
        return load_config(target, given)
    config = _as_run(target, given)
    if any(override.startswith("model.source=") for override in given):
        return config
    return replace(config, model=replace(config.model, source=str(last_checkpoint(target))))


def _as_run(target: Path, overrides: list[str]) -> Config:
    """A run's configuration, with its own copy of the plan that it was given."""
    config = load_config(target / "config.yaml", overrides)
    if config.plan is None or any(override.startswith("plan=") for override in overrides):
        return config
    return replace(config, plan=str(target / "plan.yaml"))


def _prepared(config: Config) -> Setup:
    setup = _late("rlayout.setup").prepare(config)
    for warning in setup.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    return setup


def _late(module: str) -> ModuleType:
    """A module that is imported only when it is needed.

    ``rlayout.setup`` needs transformers, ``rlayout.run`` Ray, TensorBoard and the procedural tasks: seconds
    that nobody should wait to read that a key is misspelt.
    """
    return importlib.import_module(module)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _interrupt)
    app()
