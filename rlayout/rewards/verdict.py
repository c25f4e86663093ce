"""What a verifier says about an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The reward of one answer, whether the answer is right, and why, for the log."""

    reward: float
    correct: bool
    reason: str
