"""The calls that need no model: rewards and small functions of the whole batch, on CPU."""

from __future__ import annotations

from collections.abc import Mapping

from rlayout.data.batch import Batch
from rlayout.data.objective import Compute, Statistic
from rlayout.rewards.judge import Judge
from rlayout.runtime.orders import CallReport
from rlayout.runtime.store import Rows, assemble
from rlayout.runtime.usage import Stopwatch
from rlayout.spec.dataflow import Call, Kind

HOST = -1
"""The device number of the host process in reports and timelines."""


class Host:
    """Runs in its own process, so that a verifier can neither stop the workers nor the controller."""

    def __init__(self, judge: Judge | None) -> None:
        self._judge = judge

    def execute(
        self, call: Call, compute: Compute | None, rows: Rows, *pieces: Batch
    ) -> tuple[CallReport, Batch]:
        """Run a reward or compute call over all of its rows."""
        watch = Stopwatch()
        batch = assemble(pieces, rows.ids, rows.groups, call.inputs)
        statistics: Mapping[str, Statistic] = {}
        if call.kind is Kind.REWARD:
            assert self._judge is not None, "a reward call needs a reward"
            result = self._judge(batch)
        else:
            assert compute is not None, f"compute call {call.name!r} has no function"
            result, statistics = compute(batch)
        fresh = tuple(key for key in result.keys if key not in batch.keys)
        usage = watch.usage(batch.num_tokens)
        return CallReport(HOST, Rows.of(result), fresh, usage, statistics), result.only(fresh)
