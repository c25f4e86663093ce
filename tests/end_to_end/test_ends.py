"""Runs that end before their time: nothing keeps running, and what was saved stays whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlayout.model.huggingface import check_weights
from rlayout.run_folder import last_checkpoint
from tests import tiny
from tests.command_line import REWARD, command, environment, only_run, rlayout, settings, write

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def endless(home: Path, **changes: Any) -> Path:
    """A run that saves every step and would take hours."""
    changes = {"steps": 100_000, "checkpoints": {"every_steps": 1, "keep": 2}, **changes}
    return write(home / "endless.yaml", settings(home, evaluation={"problems": 0}, **changes))


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {what}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)],
    ids=["Ctrl-C at a terminal reaches the whole group", "SIGTERM reaches one process"],
)
def test_a_run_that_is_stopped(home: Path, number: int, send: Callable[[int, int], None]) -> None:
    checkpoints = home / "runs"
    process = subprocess.Popen(
        # As at a terminal: what a script starts in the background inherits that Ctrl-C is ignored.
        ["env", "--default-signal=INT", *command("train", endless(home))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: any(checkpoints.glob("*/checkpoints/step-*")) or process.poll() is not None,
            200,
            "a first checkpoint",
        )
        assert process.poll() is None, process.communicate()[1]
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("ray::Worker" in p.name() for p in family), [p.name() for p in family]
        send(process.pid, number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error == "stopped: the workers are ended, checkpoints already written are kept\n"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    run = only_run(home / "runs")
    names = {p.name for p in (run / "checkpoints").iterdir()}
    assert names
    assert all(re.fullmatch(r"step-\d+", name) for name in names), names
    for name in names:
        check_weights(str(run / "checkpoints" / name))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the tiny model and its logs, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_earlier_checkpoint(home: Path, small_disk: Path) -> None:
    done = rlayout("train", endless(home, output=str(small_disk)))
    assert done.returncode == 1, done.stdout
    assert re.match(r"CheckpointError: checkpoint .*/step-\d+: .*[Nn]o space left", done.stderr), done.stderr
    assert "earlier checkpoints in" in done.stderr
    run = only_run(small_disk)
    last = last_checkpoint(run)
    check_weights(str(last))
    assert [p.name for p in (run / "checkpoints").iterdir()] == [last.name]
