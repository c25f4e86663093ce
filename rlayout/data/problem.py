"""One problem, as every dataset yields it and every verifier judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """A question with what is needed to judge or imitate an answer.

    Attributes:
        question: the text of the question (of a conversation: its last message).
        answer: the expected final answer, without any marks around it.
        solution: a worked solution to imitate; its last line states the answer.
        messages: the conversation so far, if the question is more than one text.
        metadata: plain data for the verifier.
    """

    question: str
    answer: str | None = None
    solution: str | None = None
    messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
