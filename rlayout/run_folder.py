"""The folder of a run: how it is named, and what can be read back from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rlayout.errors import ConfigError


def new_folder(parent: Path, name: str) -> Path:
    """Make the folder of a new run, named by the configuration and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = parent / (f"{name}-{stamp}" if attempt == 0 else f"{name}-{stamp}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"output: cannot make the run folder {folder}: {error.strerror}") from error
        return folder
    raise ConfigError(f"output: {parent} already has a thousand runs of this second")


def last_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of a run.

    Raises:
        ConfigError: the run has none.
    """
    found = sorted((folder / "checkpoints").glob("step-*"), key=lambda p: int(p.name.removeprefix("step-")))
    if not found:
        raise ConfigError(f"run {folder} has no checkpoint")
    return found[-1]


def is_run(path: Path) -> bool:
    """Whether ``path`` is the folder of a run."""
    return (path / "config.yaml").is_file()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of one of a run's JSON-lines files; none if it does not exist.

    A run that was killed may have left half a line at the end: it is no record.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
