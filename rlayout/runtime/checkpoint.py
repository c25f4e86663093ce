"""Folders that are either whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlayout.errors import CheckpointError

PARTIAL = ".partial"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a scratch folder beside ``folder`` that takes its name only when the block ends well.

    A folder that was there before is replaced only then, so a full disk or a kill leaves it intact.

    Raises:
        CheckpointError: writing failed (disk full, no permission); the scratch folder is removed.
    """
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        _flush(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder}: {error.strerror or error}; earlier checkpoints in {folder.parent} are intact"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def keep_last(folder: Path, count: int) -> None:
    """Remove all but the ``count`` newest of the checkpoints ``step-N`` in ``folder``."""
    found = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    for old in found[: max(0, len(found) - count)]:
        shutil.rmtree(old)


def remove_partial(folder: Path) -> None:
    """Remove what writers that were killed have left of checkpoints in ``folder``; they must be gone."""
    for partial in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(partial, ignore_errors=True)
