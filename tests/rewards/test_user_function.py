"""Reward functions of users."""

import math
import pickle
import sys
from pathlib import Path

import pytest

from rlayout.data.problem import Problem
from rlayout.errors import ConfigError, RewardError
from rlayout.rewards.user_function import FunctionVerifier

SUM = Problem("4 + 3 =", answer="7")


def write(folder: Path, body: str) -> str:
    (folder / "my_reward.py").write_text(body)
    return f"{folder}/my_reward.py:score"


def returning(folder: Path, expression: str) -> FunctionVerifier:
    return FunctionVerifier(write(folder, f"def score(problem, text):\n    return {expression}\n"))


@pytest.mark.parametrize(
    ("expression", "reward", "correct"),
    [
        ("problem.answer in text", 1.0, True),
        ("problem.answer == text", 0.0, False),
        ("0.25", 0.25, False),
        ("-2", -2.0, False),
        ("__import__('torch').tensor(1.5)", 1.5, True),
        ("__import__('fractions').Fraction(1, 2)", 0.5, False),
    ],
)
def test_numbers_and_bools_are_rewards(tmp_path, expression, reward, correct):
    verdict = returning(tmp_path, expression).judge(SUM, "it is 7", finished=False)
    assert (verdict.reward, verdict.correct) == (reward, correct)


@pytest.mark.parametrize(
    "expression", ["None", "'1'", "b'1'", "[1.0]", "float('nan')", "-float('inf')", "1e39", "10**400", "1j"]
)
def test_what_is_no_finite_number_is_an_error(tmp_path, expression):
    with pytest.raises(RewardError, match=r"my_reward\.py:score returned .*, not a finite number"):
        returning(tmp_path, expression).judge(SUM, "7", True)


def test_an_exception_is_an_error_with_its_traceback(tmp_path):
    with pytest.raises(RewardError, match=r"(?s)score failed:.*line 2, in score.*ZeroDivisionError") as caught:
        returning(tmp_path, "1 / 0").judge(SUM, "7", True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_of_a_module():
    assert FunctionVerifier("tests.rewards.test_user_function:always").judge(SUM, "", True).correct


def always(problem: Problem, text: str) -> bool:
    return True


def test_a_copy_in_another_process_imports_the_function_anew(tmp_path, monkeypatch):
    verifier = returning(tmp_path, "0.5")
    monkeypatch.chdir(tmp_path)
    relative = FunctionVerifier("my_reward.py:score")
    monkeypatch.chdir("/")
    for original in (verifier, relative):
        data = pickle.dumps(original)
        for name in [name for name in sys.modules if name.startswith("rlayout_reward_")]:
            monkeypatch.delitem(sys.modules, name)
        assert pickle.loads(data).judge(SUM, "", True).reward == 0.5


WITH_DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Score:
    value: int

def score(problem, text):
    return Score(3).value
"""


def test_a_file_may_define_dataclasses(tmp_path):
    verifier = FunctionVerifier(write(tmp_path, WITH_DATACLASS))
    assert math.isclose(verifier.judge(SUM, "", True).reward, 3)


def test_what_cannot_be_imported_is_refused_with_a_hint(tmp_path):
    path = write(tmp_path, "def scores(problem, text):\n    return 1\n")
    with pytest.raises(ConfigError, match=r"no function 'score'\. did you mean 'scores'"):
        FunctionVerifier(path)
    with pytest.raises(ConfigError, match=r"no file .*my_rewards\.py\. did you mean 'my_reward\.py'"):
        FunctionVerifier(f"{tmp_path}/my_rewards.py:score")
    with pytest.raises(
        ConfigError, match=r"module 'no\.such\.module' cannot be imported.*No module named 'no'"
    ):
        FunctionVerifier("no.such.module:score")
    (tmp_path / "broken.py").write_text("1 +\n")
    with pytest.raises(ConfigError, match=r"broken\.py cannot be imported: SyntaxError"):
        FunctionVerifier(f"{tmp_path}/broken.py:score")
