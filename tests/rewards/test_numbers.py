r"""Numbers are read exactly, or not at all."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.rewards.numbers import MAX_EXPONENT, MAX_LENGTH, parse_number

FRACTIONS = st.fractions(min_value=-(10**12), max_value=10**12)
DECIMALS = st.decimals(min_value=-(10**12), max_value=10**12, places=6)
UNITS = [
    "",
    ".",
    "%",
    " apples",
    " apples.",
    " km/h",
    " miles per hour",
    " cm^2",
    " cm²",
    "\N{DEGREE SIGN}",
    " €",
]


def signed(value: Fraction | Decimal, digits: str, minus: str) -> str:
    return f"{minus}{digits}" if value < 0 else digits


def notations(value: Fraction, minus: str) -> list[str]:
    """Ways to write ``value``."""
    over, under = abs(value.numerator), value.denominator
    written = [
        f"{over}/{under}",
        f"{over:,} / {under:,}",
        f"{2 * over}/{2 * under}",
        rf"\frac{{{over}}}{{{under}}}",
    ]
    written += [rf"\dfrac{{ {over} }}{{ {under} }}", f"00{over}/{under}"]
    if under == 1:
        written += [
            f"{over}",
            f"{over:,}",
            f"{over}.00",
            f"{over}e0",
            f"{over}0E-1",
            f"{over:,}".replace(",", "{,}"),
        ]
    return [signed(value, text, minus) for text in written]


@given(value=FRACTIONS | st.integers(-(10**20), 10**20).map(Fraction), minus=st.sampled_from("-\u2212\u2013"))
def test_every_notation_of_a_fraction_has_its_value(value, minus):
    for text in notations(value, minus):
        assert parse_number(text) == value, text


@given(value=DECIMALS, zeros=st.integers(0, 5), shift=st.integers(-20, 20))
def test_every_notation_of_a_decimal_has_its_value(value, zeros, shift):
    exact = Fraction(value)
    text = f"{value:f}" + "0" * zeros
    grouped = f"{value:,f}"
    moved = f"{value.scaleb(-shift):f}e{shift}"
    for written in (text, grouped, moved, f"  {text} ", text.removesuffix("0"), text.replace("-", "- ")):
        assert parse_number(written) == exact, written
    if text.startswith("0."):
        assert parse_number(text[1:]) == exact


@given(value=DECIMALS, unit=st.sampled_from(UNITS), wrap=st.sampled_from(["{}", "**{}**", "${}$", "`{}`"]))
def test_units_and_marks_at_the_sides_do_not_matter(value, unit, wrap):
    assert parse_number(wrap.format(f"{value:,f}{unit}")) == Fraction(value)


@given(value=DECIMALS, sign=st.sampled_from("$€£"))
def test_a_currency_in_front_does_not_matter(value, sign):
    digits = f"{abs(value):,f}"
    for text in (signed(value, f"{sign}{digits}", "-"), f"{sign}{signed(value, digits, '-')}"):
        assert parse_number(text) == Fraction(value)
    assert parse_number(f"\\{sign}{digits}" if sign == "$" else f"{sign} {digits}") == abs(Fraction(value))


@given(value=FRACTIONS, other=FRACTIONS)
def test_different_values_never_compare_equal(value, other):
    if value != other:
        assert {parse_number(t) for t in notations(value, "-")} == {value}
        assert value not in {parse_number(t) for t in notations(other, "-")}


@given(value=st.integers(-(10**30), 10**30), places=st.integers(1, 40))
def test_a_near_miss_is_not_the_value(value, places):
    assert parse_number(f"{value}.{'0' * (places - 1)}1") not in (Fraction(value), None)
    assert parse_number(f"{value}.{'0' * places}") == value


@given(
    first=FRACTIONS,
    second=FRACTIONS,
    between=st.sampled_from(
        [" ", ", ", " or ", " and ", "; ", " = ", " - ", "/", "..", "\n", "x", "^", ":", " to ", "~", "_", " %"]
    ),
)
def test_two_numbers_are_no_number(first, second, between):
    for a in notations(first, "-")[:2]:
        for b in notations(second, "-")[:2]:
            assert parse_number(f"{a}{between}{b}") is None


NO_NUMBERS = [
    *("", " ", ".", "-", "+", "$", "%", ",", "/", "e5", "NaN", "inf", "-inf", "Infinity", "True", "x", "five"),
    *("1,23", "1,2345", "12,34,567", "0,123", ",123", "1,", "1,234,5", "1_000", "1 000", "17..", "5.e3"),
    *("--5", "+-5", "-+5", "-$-5", "$$5", "5-", "(5)", "[5]", "{5}", "<5", ">5", "~5", "≈5", "±5", "≠5"),
    *("3/0", "0/0", "1/2/3", "1.5/2", "3 1/2", r"2\frac{1}{2}", r"\frac{1}{2}3", r"\frac{1}{}", r"\frac{1}"),
    *(r"\sqrt{2}", "3x", "3 x", "17k", "17m", "2i", "2e", "2 pi", r"2\pi", "5!", "2^3", "2**3", "2*3", "2+3"),
    *("17 thousand", "17 million dollars", "3 dozen", "17 hundred", "17 seventeen", "17 squared"),
    *("17 or so", "17 not", "17=17", "x = 17", "17 (or 18)", "17,18", "17:18", "17\x00", "17\ud800"),
    *("0x11", "1e", "1e+", "1e3.5", "1e5e5", "$5%", "5%%", "٣", "१७", "²", "½", "五", "\uff11\uff17"),
]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_ambiguous_or_no_number_is_refused(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25%", Fraction(25)),
        (r"25\%", Fraction(25)),
        ("0.50", Fraction(1, 2)),
        (r"17\text{ apples}", Fraction(17)),
        (r"\$1{,}234.50", Fraction(2469, 2)),
        (r"1,\!234", Fraction(1234)),
        (r"90^\circ", Fraction(90)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        ("1e400", Fraction(10**400)),
        ("+5", Fraction(5)),
        ("-0", Fraction(0)),
    ],
)
def test_examples(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "1e999999999",
        "1e-999999999",
        "9" * 100_000,
        "1e" + "9" * 200,
        f"1e{MAX_EXPONENT + 1}",
        "1" * (MAX_LENGTH + 1),
    ],
)
def test_monstrous_numbers_are_refused_at_once(text):
    start = time.perf_counter()
    assert parse_number(text) is None
    assert time.perf_counter() - start < 0.1


@given(st.text(alphabet="0123456789,.-+/eE$%{}\\frac text*or \n\u2212", max_size=300) | st.text(max_size=300))
def test_arbitrary_text_never_raises(text):
    parse_number(text)
