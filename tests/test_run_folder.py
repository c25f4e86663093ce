"""The folder of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlayout.errors import ConfigError
from rlayout.run_folder import is_run, last_checkpoint, new_folder, read_records


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = [new_folder(tmp_path / "runs", "demo") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(f.is_dir() and f.name.startswith("demo-") for f in folders)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output: cannot make the run folder .*file/demo-.*Not a directory"):
        new_folder(tmp_path / "file", "demo")


def test_the_last_checkpoint_is_the_one_with_the_largest_number(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-2", ".step-11.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert last_checkpoint(tmp_path).name == "step-10"


def test_a_run_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run {tmp_path} has no checkpoint"):
        last_checkpoint(tmp_path)


def test_records_of_a_killed_run_are_read_without_the_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    path.write_text('{"step": 0, "text": "a\\u2028b"}\n{"step": 1}\n{"ste')
    assert read_records(path) == [{"step": 0, "text": "a\u2028b"}, {"step": 1}]


def test_a_run_is_a_folder_with_a_configuration(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    assert is_run(tmp_path)
    assert not is_run(tmp_path / "config.yaml")
