import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlayout.evaluation.accuracy import accuracy, mean_pass_at_k, pass_at_k, wilson_interval


def test_accuracy():
    found = accuracy([True, False, True, True])
    assert found.mean == 0.75
    assert found.count == 4
    assert (found.low, found.high) == wilson_interval(3, 4)
    assert str(found) == "75.0% [30.1%, 95.4%] of 4"


def test_published_wilson_intervals():
    # Newcombe 1998 (Statistics in Medicine 17), table I, method 3
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (successes, trials), expected in published.items():
        assert wilson_interval(successes, trials) == pytest.approx(expected, abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_holds_the_share_and_solves_the_score_equation(counts: tuple[int, int]):
    successes, trials = counts
    low, high = wilson_interval(successes, trials)
    share = successes / trials
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    for end in (low, high):
        distance = abs(share - end)
        assert distance == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / trials), abs=1e-6)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [i < correct for i in range(n)]
        expected = fmean(any(subset) for subset in itertools.combinations(answers, k))
        assert pass_at_k(n, correct, k) == pytest.approx(expected)


def test_pass_at_k_of_many_samples():
    # exact integers: no overflow, and pass@1 is the share of right answers
    assert pass_at_k(10_000, 2_500, 1) == pytest.approx(0.25)
    assert pass_at_k(10_000, 1, 10_000) == 1.0


def test_mean_pass_at_k():
    problems = [[True, False], [False, False, False], [True, True]]
    assert mean_pass_at_k(problems, 1) == pytest.approx((0.5 + 0 + 1) / 3)
    assert mean_pass_at_k(problems, 2) == pytest.approx((1 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accuracy([]), "at least one"),
        (lambda: wilson_interval(1, 0), "1 successes of 0 trials"),
        (lambda: wilson_interval(3, 2), "3 successes of 2 trials"),
        (lambda: wilson_interval(1, 2, confidence=95), "between 0 and 1, got 95"),
        (lambda: pass_at_k(4, 1, 5), "pass@5 of 4 answers"),
        (lambda: pass_at_k(4, 1, 0), "pass@0 of 4 answers"),
        (lambda: pass_at_k(4, 5, 1), "5 right answers of 4"),
        (lambda: mean_pass_at_k([], 1), "no problems"),
        (lambda: mean_pass_at_k([[True]], 2), "pass@2 of 1 answers"),
    ],
)
def test_arguments_out_of_range_are_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
