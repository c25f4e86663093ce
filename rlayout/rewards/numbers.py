r"""Numbers as people and models write them, read exactly.

Accepted: ``17``, ``-3`` (also with a Unicode minus), ``+5``, ``1,234``, ``0.50``, ``.5``, ``1.5e3``,
``3/4``, ``\frac{3}{4}``, each with a final period, a currency sign in front or a unit behind
(``$17``, ``17 apples``, ``60 km/h``, ``25%``), bold or in dollar signs as Markdown and LaTeX have it.

A unit or sign says nothing about the value: ``25%`` is 25, never 1/4. Whatever could be read in two ways
is no number: ``17 or 18``, ``17 18``, ``1,23``, ``17 thousand``, ``3 1/2``, ``3x``, ``17m``, ``~17``.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 256
MAX_EXPONENT = 400
"""Text may claim 1e999999999, whose digits would fill the memory; doubles end at 1e308."""

DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?) \s* (?P<currency>[$€£¥₹]?) \s* (?P<inner_sign>[-+]?)
    (?: (?P<over>{DIGITS}) \s* / \s* (?P<under>{DIGITS})
      | (?P<whole>{DIGITS}) (?:\.(?P<decimals>[0-9]+))? (?:[eE](?P<exponent>[-+]?[0-9]+))?
      | \.(?P<only_decimals>[0-9]+) (?:[eE](?P<only_exponent>[-+]?[0-9]+))?
    )
    (?P<unit>.*)
    """,
    re.VERBOSE | re.DOTALL,
)
LETTER = r"[^\W\d_]"
WORD = rf"{LETTER}{{2,}}"
UNIT = re.compile(rf"\s*(?:[%$€£¥₹]|°(?:\s?[CF])?|{WORD}(?:/{LETTER}+|\ {WORD}){{0,2}}(?:\^[23]|[²³])?)\.?")
SIGN_UNIT = re.compile(r"\s*[%°$€£¥₹]")
WORDS = re.compile(WORD)

MISLEADING = """
    and or to nor not no if but is are was than then of in at by with from minus plus times over divided
    more less about approximately roughly maybe perhaps either between versus vs
    half halves third thirds quarter quarters fourth fourths fifth fifths tenth tenths hundredth hundredths
    thousandth thousandths ten tens hundred hundreds thousand thousands million millions billion billions
    trillion trillions dozen dozens score pair pairs grand mil mio mrd bn tn squared cubed factorial pi
    zero one two three four five six seven eight nine eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    remainder mod base point negative
"""
NOT_UNITS = frozenset(MISLEADING.split())
"""Words that would change the value or offer a second one."""

MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63\uff0d", "-"))
LATEX = (
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\{,\}|,\\!|\\,(?=[0-9]{3})"), ","),
    (re.compile(r"\\[,;:! ]"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\s*\{?\\circ\}?"), "°"),
    # The spaces keep what stands beside a fraction apart: 2\frac{1}{2} is not 21/2.
    (re.compile(r"\\[dt]?frac\{([^{}\\]*)\}\{([^{}\\]*)\}"), r" \1/\2 "),
)


def parse_number(text: str) -> Fraction | None:
    """The value of ``text`` if all of it is one number; otherwise None."""
    if len(text) > MAX_LENGTH:
        return None
    match = NUMBER.fullmatch(strip_marks(text))
    if match is None or not _plain_unit(match["unit"]):
        return None
    if (match["sign"] and match["inner_sign"]) or (match["currency"] and SIGN_UNIT.match(match["unit"])):
        return None
    size = _fraction(match["over"], match["under"]) if match["over"] else _decimal(match)
    if size is None:
        return None
    return -size if "-" in (match["sign"], match["inner_sign"]) else size


def strip_marks(text: str) -> str:
    """``text`` without Markdown and LaTeX marks around it, and with plain minus signs."""
    text = text.strip().translate(MINUS)
    if "\\" in text or "{" in text:
        for pattern, replacement in LATEX:
            text = pattern.sub(replacement, text)
    text = text.strip().strip("*`").strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text


def _plain_unit(unit: str) -> bool:
    if unit in ("", "."):
        return True
    return bool(UNIT.fullmatch(unit)) and NOT_UNITS.isdisjoint(w.lower() for w in WORDS.findall(unit))


def _fraction(over: str, under: str) -> Fraction | None:
    denominator = int(under.replace(",", ""))
    return Fraction(int(over.replace(",", "")), denominator) if denominator else None


def _decimal(match: re.Match[str]) -> Fraction | None:
    whole = (match["whole"] or "0").replace(",", "")
    decimals = match["decimals"] or match["only_decimals"] or ""
    exponent = int(match["exponent"] or match["only_exponent"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    shift = exponent - len(decimals)
    digits = int(whole + decimals)
    return Fraction(digits * 10**shift) if shift >= 0 else Fraction(digits, 10**-shift)
