"""What a person sees while a run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class CountColumn(MofNCompleteColumn):
    """Finished and total, where there is something to count."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


class Display:
    """Progress of phases and calls. On a terminal it is live; in a log every finished step is a line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            CountColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._calls: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the progress; in a log it is never broken."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def phase(self, description: str, total: int | None = None) -> Iterator[Phase]:
        """Show a phase while the block runs."""
        task = self._progress.add_task(description, total=total, note="")
        try:
            yield Phase(self._progress, task)
        finally:
            self._progress.remove_task(task)

    # -- the controller's watcher ---------------------------------------------------------------

    def started(self, call: str) -> None:
        """A call was issued."""
        self._calls[call] = self._progress.add_task(f"  {call}", total=None, note="")

    def progressed(self, call: str, finished: int, total: int) -> None:
        """A call tells how many of its rows are finished."""
        if call in self._calls and total:
            self._progress.update(self._calls[call], completed=finished, total=total)

    def ended(self, call: str, seconds: float) -> None:
        """A call is done."""
        del seconds
        self._progress.remove_task(self._calls.pop(call))


class Phase:
    """One line of progress."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, note: str = "") -> None:
        """One more unit is done."""
        self._progress.update(self._task, advance=1, note=note)


def step_line(stage: str, step: int, steps: int, figures: Mapping[str, float]) -> str:
    """One step in one line."""
    shown = [
        ("reward {:.3f}", "answers/reward"),
        ("accuracy {:.1%}", "answers/accuracy"),
        ("entropy {:.3f}", "train/entropy"),
        ("tokens {:.0f}", "answers/tokens_mean"),
        ("cut {:.0%}", "answers/truncated"),
        ("grad {:.2f}", "train/grad_norm"),
        ("{:.1f} s", "seconds/step"),
    ]
    if "answers/reward" not in figures:  # a policy's loss says nothing by itself
        shown.insert(0, ("loss {:.4f}", "train/loss"))
    if not figures.get("answers/truncated"):
        shown = [part for part in shown if part[1] != "answers/truncated"]
    parts = [form.format(figures[key]) for form, key in shown if key in figures]
    return f"{stage} {step + 1}/{steps}  " + "  ".join(parts)
