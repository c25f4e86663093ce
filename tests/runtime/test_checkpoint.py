"""Folders that are whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlayout.errors import CheckpointError
from rlayout.runtime.checkpoint import keep_last, whole_folder


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step-1"
    with whole_folder(target) as partial:
        (partial / "weights").write_text("new")
        assert not target.exists()
    assert (target / "weights").read_text() == "new"
    assert [p.name for p in target.parent.iterdir()] == ["step-1"]


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    with whole_folder(target) as partial:
        (partial / "weights").write_text("old")
    with pytest.raises(CheckpointError, match="No space left on device; earlier checkpoints"):
        write_on_a_full_disk(target)
    assert (target / "weights").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def write_on_a_full_disk(target: Path) -> None:
    with whole_folder(target) as partial:
        (partial / "weights").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "step-1"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_the_newest_are_kept_by_number(tmp_path: Path) -> None:
    for step in (2, 10, 9, 100):
        (tmp_path / f"step-{step}").mkdir()
    keep_last(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-100"]
