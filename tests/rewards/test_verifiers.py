"""Verifiers pay right answers and nothing else."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from rlayout.data.problem import Problem
from rlayout.data.sources import load
from rlayout.errors import ConfigError, RewardError
from rlayout.rewards.verifiers import build_verifier
from rlayout.spec.serialization import from_plain
from rlayout.spec.task import ExactAnswer, Procedural, ReasoningGym, Reward, UserFunction

SUM = Problem("4 + 3 =", answer="7")


def gym_problem(task: str, **settings: Any) -> Problem:
    train, _ = load(Procedural(task, train_size=1, test_size=0, settings=settings))
    return train[0]


def test_exact_pays_the_right_answer_only():
    verifier = build_verifier(ExactAnswer())
    assert verifier.judge(SUM, "4+3=7\n#### 7.0", True).reward == 1.0
    wrong = verifier.judge(SUM, "4+3=8\n#### 8", True)
    assert (wrong.reward, wrong.correct) == (0.0, False)
    assert wrong.reason == "'8' is not '7'"
    assert verifier.judge(SUM, "7", True).reward == 0.0


@pytest.mark.parametrize("config", [ExactAnswer, ReasoningGym])
def test_a_cut_answer_earns_nothing_unless_configured(config):
    problem = gym_problem("chain_sum")
    text = f"#### {problem.answer}"
    assert build_verifier(config()).judge(problem, text, False).reward == 0.0
    assert build_verifier(config(accept_unfinished=True)).judge(problem, text, False).reward == 1.0


def test_exact_refuses_a_problem_without_an_answer():
    with pytest.raises(RewardError, match="no expected answer"):
        build_verifier(ExactAnswer()).judge(Problem("?"), "#### 7", True)


def test_reasoning_gym_asks_the_task_itself():
    problem = gym_problem("chain_sum")
    verifier = build_verifier(ReasoningGym())
    assert verifier.judge(problem, f"#### {problem.answer}.00", True).correct
    assert not verifier.judge(problem, f"#### {problem.answer}1", True).correct


def test_part_of_the_marks_is_no_reward():
    problem = gym_problem("chain_sum")
    verdict = build_verifier(ReasoningGym()).judge(problem, f"#### {problem.answer} or 0", True)
    assert verdict.reward == 0.0
    assert verdict.reason.startswith("scored 0.")


def test_reasoning_gym_judges_answers_that_are_not_unique():
    problem = gym_problem("n_queens", n=5, min_remove=3, max_remove=3)
    assert problem.answer is not None
    assert "\n" in problem.answer
    verifier = build_verifier(ReasoningGym())
    assert verifier.judge(problem, f"The board:\n#### {problem.answer}", True).correct
    assert not verifier.judge(problem, f"The board:\n#### {problem.answer.splitlines()[0]}", True).correct


@pytest.mark.parametrize("claim", ["NaN", "nan + nani", "inf", "1e999999999", "10**10**8", "9**9**9**9"])
@pytest.mark.parametrize("task", ["complex_arithmetic", "coin_flip", "countdown", "chain_sum"])
def test_values_that_deceive_or_stop_a_scorer_are_not_shown_to_it(task, claim):
    verdict = build_verifier(ReasoningGym()).judge(gym_problem(task), f"#### {claim}", True)
    assert verdict.reward == 0.0


def test_an_answer_that_the_scorer_cannot_read_is_wrong():
    problem = gym_problem("prime_factorization")
    verifier = build_verifier(ReasoningGym())
    assert verifier.judge(problem, f"#### {problem.answer}", True).correct
    verdict = verifier.judge(problem, "#### two", True)
    assert verdict.reward == 0.0
    assert verdict.reason.startswith("the scorer cannot read 'two': ValueError")


def test_a_scorer_that_fails_on_the_reference_answer_too_is_an_error():
    problem = gym_problem("chain_sum")
    broken = replace(problem, metadata={**problem.metadata, "entry": {"answer": 7}})
    with pytest.raises(RewardError, match=r"scorer of task 'chain_sum' failed on '7': TypeError"):
        build_verifier(ReasoningGym()).judge(broken, "#### 7", True)


def test_reasoning_gym_refuses_a_problem_from_elsewhere():
    with pytest.raises(RewardError, match="does not come from reasoning_gym"):
        build_verifier(ReasoningGym()).judge(SUM, "#### 7", True)


def test_rewards_are_told_apart_by_name():
    assert from_plain(Reward, {"name": "exact", "anchors": ["boxed"]}) == ExactAnswer(("boxed",))  # type: ignore[arg-type]
    assert from_plain(Reward, {"name": "function", "function": "a:b"}) == UserFunction("a:b")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one anchor"):
        from_plain(ExactAnswer, {"anchors": []})
    with pytest.raises(ConfigError, match="did you mean 'boxed'"):
        from_plain(ExactAnswer, {"anchors": ["box"]})
    with pytest.raises(ConfigError, match=r"expected package\.module:function"):
        from_plain(UserFunction, {"function": "reward"})


@pytest.mark.parametrize("config", [ExactAnswer(), ReasoningGym()])
def test_verifiers_travel_between_processes(config):
    verifier = build_verifier(config)
    assert pickle.loads(pickle.dumps(verifier)) == verifier
