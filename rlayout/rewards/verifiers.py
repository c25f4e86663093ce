"""Judging one answer.

A verifier runs where its caller puts it; it holds no process and no device. What it is given by a model
is arbitrary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from reasoning_gym.dataset import ProceduralDataset

from rlayout.data.problem import Problem
from rlayout.data.procedural import build_generator
from rlayout.errors import RewardError
from rlayout.rewards.answers import equal_answers, extract
from rlayout.rewards.user_function import FunctionVerifier
from rlayout.rewards.verdict import Verdict
from rlayout.spec.task import Anchor, ExactAnswer, ReasoningGym, Reward, UserFunction

DECEPTIVE = re.compile(r"\*\*|[0-9]{400}|[0-9.]e[-+]?[0-9]{4,}|\b(?:nan|inf|infinity)[ij]?\b", re.IGNORECASE)
"""Claims that scorers mishandle: ``complex_arithmetic`` of reasoning_gym 0.1.25 gives full marks to NaN,
``coin_flip`` writes out 1e999999999, ``countdown`` computes 9**9**9**9."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
"""What a scorer may raise at an answer of another form than it expects."""

CUT = Verdict(0.0, False, "cut by the length limit")


class Verifier(Protocol):
    """Judges the text of an answer."""

    def judge(self, problem: Problem, text: str, finished: bool) -> Verdict:
        """Judge ``text``; ``finished`` is false if the length limit cut it.

        Raises:
            RewardError: the problem cannot be judged, or the judging itself failed.
        """
        ...


def build_verifier(config: Reward) -> Verifier:
    """The verifier that ``config`` describes.

    Raises:
        ConfigError: a user's function cannot be imported.
    """
    match config:
        case ExactAnswer():
            return ExactVerifier(config.anchors, config.accept_unfinished)
        case ReasoningGym():
            return ReasoningGymVerifier(config.anchors, config.accept_unfinished)
        case UserFunction():
            return FunctionVerifier(config.function)


@dataclass(frozen=True)
class ExactVerifier:
    """1 for an anchored answer that equals the expected one."""

    anchors: tuple[Anchor, ...]
    accept_unfinished: bool = False

    def judge(self, problem: Problem, text: str, finished: bool) -> Verdict:
        """See ``Verifier``."""
        if problem.answer is None:
            raise RewardError(f"the problem has no expected answer to compare with: {problem.question[:80]!r}")
        if not (finished or self.accept_unfinished):
            return CUT
        found = extract(text, self.anchors)
        if found.answer is None:
            return Verdict(0.0, False, found.reason)
        if equal_answers(found.answer, problem.answer):
            return Verdict(1.0, True, "equal")
        return Verdict(0.0, False, f"{found.answer[:80]!r} is not {problem.answer[:80]!r}")


@dataclass(frozen=True)
class ReasoningGymVerifier:
    """1 for an anchored answer to which the task's own scorer gives full marks.

    Several scorers give part of the marks to a guess; only full marks count here.
    """

    anchors: tuple[Anchor, ...]
    accept_unfinished: bool = False

    def judge(self, problem: Problem, text: str, finished: bool) -> Verdict:
        """See ``Verifier``."""
        if not {"task", "settings", "entry"} <= problem.metadata.keys():
            raise RewardError(
                "the problem does not come from reasoning_gym, whose scorer was asked for; use the reward "
                f"'exact' or a function: {problem.question[:80]!r}"
            )
        if not (finished or self.accept_unfinished):
            return CUT
        entry = problem.metadata["entry"]
        # Some tasks ask for a grid: the answer is then all that follows the anchor.
        found = extract(text, self.anchors, multiline="\n" in str(entry["answer"]))
        if found.answer is None:
            return Verdict(0.0, False, found.reason)
        if DECEPTIVE.search(found.answer) and not DECEPTIVE.search(str(entry["answer"])):
            return Verdict(0.0, False, f"not shown to the scorer: {found.answer[:80]!r}")
        return _ask_scorer(problem.metadata, found.answer)


def _ask_scorer(metadata: Mapping[str, Any], answer: str) -> Verdict:
    """Judge by the task's scorer.

    Several scorers raise on answers that they cannot read (``prime_factorization`` on any that is not made
    of integers). Such an answer is wrong, if the scorer works at all: it must score the reference answer.
    """
    task, entry = metadata["task"], dict(metadata["entry"])
    scorer = _scorer(task, json.dumps(metadata["settings"], sort_keys=True))
    try:
        score = float(scorer.score_answer(answer=answer, entry=entry))
    except UNREADABLE as error:
        if not _scores_its_reference(scorer, entry):
            raise RewardError(f"the scorer of task {task!r} failed on {answer[:200]!r}: {error!r}") from error
        return Verdict(0.0, False, f"the scorer cannot read {answer[:80]!r}: {error!r}")
    except Exception as error:
        raise RewardError(f"the scorer of task {task!r} failed on {answer[:200]!r}: {error!r}") from error
    return Verdict(float(score == 1.0), score == 1.0, f"scored {score:g}: {answer[:80]!r}")


def _scores_its_reference(scorer: ProceduralDataset, entry: dict[str, Any]) -> bool:
    try:
        scorer.score_answer(answer=entry["answer"], entry=entry)
    except UNREADABLE:
        return False
    return True


@lru_cache(maxsize=64)
def _scorer(task: str, settings: str) -> ProceduralDataset:
    return build_generator(task, json.loads(settings), seed=0, size=1)
