"""Failures on real workers: one error that names who and why, everything ended, nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from rlayout.data.batch import Batch
from rlayout.data.objective import Loss, LossOutput, TokenScores, Totals
from rlayout.errors import WorkerError
from rlayout.runtime.session import Limits
from tests import tiny
from tests.distributed.stage import QUESTIONS, grpo, new_session, placement, prompts, start

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class FailingLoss(Loss):
    def __call__(self, scores: TokenScores, batch: Batch, totals: Totals) -> LossOutput:
        raise ValueError(f"no loss for {len(batch)} rows")


@dataclass(frozen=True)
class SleepingLoss(Loss):
    def __call__(self, scores: TokenScores, batch: Batch, totals: Totals) -> LossOutput:
        time.sleep(60)
        raise AssertionError("nobody ended this worker")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.model_folder(tmp_path_factory.mktemp("model")))


def test_an_exception_in_a_worker_arrives_with_its_traceback_and_ends_all(source: str) -> None:
    before = {p.pid for p in psutil.process_iter()}
    plan = {"generate": placement(0, 1), "ref_infer": placement(0), "train": placement(0, 1)}
    with new_session(2) as session:
        trial = start(session, source, grpo(), plan, train=FailingLoss())
        with pytest.raises(
            WorkerError, match=r"(?s)worker \d in call 'train' failed in step 0.*no loss for \d+ rows"
        ):
            trial.step(0, prompts(*QUESTIONS))
    assert_all_ended(before)


def test_a_worker_that_dies_is_named_and_nothing_hangs(source: str) -> None:
    before = {p.pid for p in psutil.process_iter()}
    plan = {"generate": placement(0, 1), "ref_infer": placement(0), "train": placement(0, 1)}
    with new_session(2) as session:
        pids = [pid for pid, _ in session.on_all("describe", what="answer")]
        trial = start(session, source, grpo(), plan, train=SleepingLoss())
        killer = _kill_later(pids[1], 6.0)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"worker 1 in call 'train' died"):
            trial.step(0, prompts(*QUESTIONS))
        assert time.monotonic() - began < 30
        killer.join()
    assert_all_ended(before)


def test_a_call_that_takes_too_long_is_named(source: str) -> None:
    plan = {"generate": placement(0), "ref_infer": placement(0), "train": placement(0)}
    with new_session(1, Limits(call=8.0)) as session:
        trial = start(session, source, grpo(), plan, train=SleepingLoss())
        with pytest.raises(WorkerError, match="worker 0 did not finish call 'train' within 8 seconds"):
            trial.step(0, prompts(*QUESTIONS))


def _kill_later(pid: int, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.start()
    return timer


def assert_all_ended(before: set[int]) -> None:
    """No Ray process that was not there before is left after a moment."""
    deadline = time.monotonic() + 20
    left: list[Any] = []
    while time.monotonic() < deadline:
        left = [
            p.info
            for p in psutil.process_iter(["pid", "name", "status"])
            if p.info["pid"] not in before
            and p.info["status"] != psutil.STATUS_ZOMBIE
            and any(word in p.info["name"] for word in ("ray", "gcs_server"))
        ]
        if not left:
            return
        time.sleep(0.2)
    raise AssertionError(f"still running: {left}")
