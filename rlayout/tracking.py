"""The files of a run: metrics, receipts, sample answers, timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rlayout.errors import CheckpointError


class Tracker:
    """Writes a run's figures as they come. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.close()

    def metrics(self, stage: str, step: int, figures: Mapping[str, float]) -> None:
        """One line of ``metrics.jsonl`` and one point per figure in TensorBoard."""
        self._append("metrics.jsonl", {"stage": stage, "step": step, **figures})
        for name, value in figures.items():
            self._board.add_scalar(f"{stage}/{name}", value, step)

    def receipts(self, stage: str, step: int, receipts: Iterable[Mapping[str, Any]]) -> None:
        """Weight receipts of a step, one line each."""
        for receipt in receipts:
            self._append("receipts.jsonl", {"stage": stage, "step": step, **receipt})

    def samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Answers with their prompts and rewards, one line each."""
        for sample in samples:
            self._append("samples.jsonl", sample)

    def spans(self, spans: Iterable[Mapping[str, Any]]) -> None:
        """What each device did when, one line each."""
        for span in spans:
            self._append("timeline.jsonl", span)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        path = self._folder / name
        try:
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot write: {error.strerror or error}") from error
