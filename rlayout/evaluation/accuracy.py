"""How often answers are right: accuracy with its uncertainty, and pass@k. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers and the interval that it is known to.

    Attributes:
        mean: right answers over answers.
        low: lower end of the confidence interval.
        high: upper end of the confidence interval.
        count: answers.
    """

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.count}"


def accuracy(correct: Sequence[bool], confidence: float = 0.95) -> Accuracy:
    """Share of right answers among independent ones: one per problem, for instance greedy ones.

    Args:
        correct: whether each answer is right; at least one.
        confidence: coverage of the interval.

    Raises:
        ValueError: no answers.
    """
    if not correct:
        raise ValueError("accuracy of no answers: at least one is needed")
    low, high = wilson_interval(sum(correct), len(correct), confidence)
    return Accuracy(sum(correct) / len(correct), low, high, len(correct))


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927), which stays sensible for few trials and near 0 and 1.

    Args:
        successes: from 0 to ``trials``.
        trials: at least 1.
        confidence: coverage, between 0 and 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: expected 0 to trials, and a trial")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of ``k`` answers is right: 1 - C(n - c, k) / C(n, k), unbiased.

    Chen et al. 2021, *Evaluating large language models trained on code* (arXiv 2107.03374), eq. 1.

    Args:
        num_samples: answers to one problem, n.
        num_correct: right ones among them, c.
        k: from 1 to ``num_samples``.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} answers: k must lie between 1 and the number of answers")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} right answers of {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """Mean of ``pass_at_k`` over problems; ``correct`` holds the answers of each.

    Raises:
        ValueError: no problems, or one with fewer than ``k`` answers.
    """
    if not correct:
        raise ValueError(f"pass@{k} of no problems: at least one is needed")
    return fmean(pass_at_k(len(answers), sum(answers), k) for answers in correct)
