"""Worked solutions of procedural tasks: the steps that a supervised warm-up imitates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlayout.errors import DataError, nearest

Entry = Mapping[str, Any]
"""A problem as ``reasoning_gym`` yields it: ``question``, ``answer`` and ``metadata``."""


def chain_sum(entry: Entry) -> str:
    """Running sums: ``4 + 3 - 7`` becomes ``4+3=7``, ``7-7=0``, ``#### 0``, one per line."""
    first, *rest = entry["metadata"]["expression"].split()
    total = int(first)
    lines = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if operator == "+" else total - int(term)
        lines.append(f"{total}{operator}{term}={after}")
        total = after
    return "\n".join([*lines, f"#### {total}"])


def bare_answer(entry: Entry) -> str:
    """The answer alone, marked as in a worked solution."""
    return f"#### {entry['answer']}"


WORKED: Mapping[str, Callable[[Entry], str]] = {"chain_sum": chain_sum}


def worked_solution(task: str, entry: Entry) -> str:
    """The worked solution of ``entry``, a problem of the procedural task ``task``.

    Raises:
        DataError: nobody wrote down how ``task`` is solved.
    """
    if task not in WORKED:
        raise DataError(f"task {task!r} has no worked solutions. {nearest(task, WORKED)}")
    return WORKED[task](entry)
