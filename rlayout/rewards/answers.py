r"""Finding the final answer in a text, and comparing it with the expected one.

An answer counts only where an anchor announces it: ``#### x``, ``\boxed{x}`` or ``Answer: x``. The last
anchor of a kind is the answer; the rest of its line, or what the braces hold, is all of it. Two anchors
that disagree on the last one's line, or two kinds of anchors that disagree, announce nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlayout.rewards.numbers import parse_number, strip_marks
from rlayout.spec.task import Anchor

HASHES = re.compile(r"(?<!#)####(?!#)")
ANSWER = re.compile(r"(?<![^\W_])answer[ \t*_]{0,8}:[*_]{0,3}", re.IGNORECASE)
BOXED = re.compile(r"\\boxed[ \t]*\{")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True)
class Extraction:
    """The answer that a text announces, or None and why."""

    answer: str | None
    reason: str = ""


@dataclass(frozen=True)
class Candidate:
    """What stands after one anchor: where the anchor starts and the text, None if it never ends."""

    start: int
    text: str | None


def extract(text: str, anchors: Sequence[Anchor], *, multiline: bool = False) -> Extraction:
    """The final answer of ``text``.

    Args:
        text: arbitrary text; the time is linear in its length.
        anchors: which anchors count.
        multiline: whether an answer goes on to the end of the text instead of its line.
    """
    found = {anchor: list(_candidates(text, anchor, multiline)) for anchor in anchors}
    last = [candidates[-1] for candidates in found.values() if candidates]
    if not last:
        return Extraction(None, f"no answer after {' or '.join(anchors)}")
    final = max(last, key=lambda c: c.start)
    if not final.text:
        return Extraction(None, "nothing stands after the last anchor")
    line_start = text.rfind("\n", 0, final.start) + 1
    rivals = last + [c for candidates in found.values() for c in candidates if c.start >= line_start]
    for rival in dict.fromkeys(candidate.text for candidate in rivals):
        if rival != final.text and (rival is None or not equal_answers(rival, final.text)):
            return Extraction(None, f"two answers: {str(rival)[:80]!r} and {final.text[:80]!r}")
    return Extraction(final.text)


def equal_answers(answer: str, expected: str) -> bool:
    """Whether two answers are the same number; or, where ``expected`` is no number, the same text.

    Texts are compared without regard to case, repeated spaces and a final period.
    """
    number = parse_number(expected)
    if number is not None:
        return parse_number(answer) == number
    return _plain(answer) == _plain(expected)


def _plain(text: str) -> str:
    return " ".join(strip_marks(text).removesuffix(".").casefold().split())


def _candidates(text: str, anchor: Anchor, multiline: bool) -> Iterator[Candidate]:
    if anchor == "boxed":
        yield from _boxed(text)
        return
    matches = list((HASHES if anchor == "hashes" else ANSWER).finditer(text))
    ends = [match.start() for match in matches[1:]] + [len(text)]
    for match, end in zip(matches, ends, strict=False):
        rest = text[match.end() : end]
        if not multiline:
            rest = rest.partition("\n")[0]
        yield Candidate(match.start(), _open_box(rest).strip())


def _boxed(text: str) -> Iterator[Candidate]:
    openings = {match.end() - 1: match.start() for match in BOXED.finditer(text)}
    closings = _closings(text) if openings else {}
    for opening, start in openings.items():
        closing = closings.get(opening)
        yield Candidate(start, None if closing is None else text[opening + 1 : closing].strip())


def _open_box(text: str) -> str:
    r"""``text`` with the content of its first box in place of it, for ``Answer: \boxed{x}``."""
    box = BOXED.search(text)
    closing = _closings(text).get(box.end() - 1) if box else None
    if box is None or closing is None:
        return text
    return f"{text[: box.start()]} {text[box.end() : closing]} {text[closing + 1 :]}"


def _closings(text: str) -> dict[int, int]:
    """Where each brace of ``text`` is closed, for those that are; escaped braces are text."""
    stack: list[int] = []
    closed: dict[int, int] = {}
    for match in BRACES.finditer(text):
        if match[0] == "{":
            stack.append(match.start())
        elif match[0] == "}" and stack:
            closed[stack.pop()] = match.start()
    return closed
