"""Hints name the nearest valid choice, and never a wall of names."""

from __future__ import annotations

from rlayout.errors import nearest


def test_a_near_miss_and_few_choices() -> None:
    assert nearest("grop", ["sft", "grpo"]) == "did you mean 'grpo'? Valid: grpo, sft"
    assert nearest("zzz", []) == "Valid: none"


def test_of_many_choices_the_nearest_are_named() -> None:
    hint = nearest("task_7x", [f"task_{i}" for i in range(100)])
    assert hint.startswith("did you mean 'task_7'?") or "task_7" in hint
    assert hint.endswith("and 88 more")
    assert hint.count(",") == 11
