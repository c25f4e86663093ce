"""Train language models with reinforcement learning, as a plan says."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, ParamSpec

import typer
from rich.console import Console

from rlayout.config import Config, load_config
from rlayout.display import Display
from rlayout.errors import ConfigError, RlayoutError
from rlayout.report import outcome_table, samples_report, setup_report
from rlayout.run import evaluate as evaluate_run
from rlayout.run import generate as generate_answers
from rlayout.run import train as train_run
from rlayout.run_folder import is_run, last_checkpoint, new_folder, read_records
from rlayout.setup import Setup, prepare

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
    folder = new_folder(Path(setup.config.output), config.stem)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    with Display(console) as display:
        outcome = train_run(setup, folder, display)
    console.print(outcome_table(outcome))


@app.command()
@friendly
def evaluate(config: ConfigOrRun, overrides: Overrides = None) -> None:
    """Measure greedy accuracy on the held-out problems."""
    setup = _prepared(_config_of(config, overrides))
    folder = new_folder(Path(setup.config.output), f"{config.stem}-evaluation")
    with Display(console) as display:
        outcome = evaluate_run(setup, folder, display)
    console.print(outcome_table(outcome))


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
        answers = generate_answers(setup, prompt, samples, greedy, display)
    for question, texts in zip(prompt, answers, strict=True):
        console.rule(question)
        for text in texts:
            console.print(text, markup=False, highlight=False)


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
    console.print(setup_report(prepare(_config_of(target, overrides))))


def _config_of(target: Path, overrides: list[str] | None) -> Config:
    if not is_run(target):
        return load_config(target, overrides or [])
    given = list(overrides or [])
    if not any(o.startswith("model.source=") for o in given):
        given.append(f"model.source={last_checkpoint(target)}")
    return load_config(target / "config.yaml", given)


def _prepared(config: Config) -> Setup:
    setup = prepare(config)
    for warning in setup.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    return setup


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _interrupt)
    app()
