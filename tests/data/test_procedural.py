"""Problems of reasoning_gym's tasks."""

import pickle

import pytest

from rlayout.data.sources import load
from rlayout.data.worked import WORKED, worked_solution
from rlayout.errors import DataError
from rlayout.rewards.verifiers import build_verifier
from rlayout.spec.task import ExactAnswer, Procedural, ReasoningGym

SMALL = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
"""Only 200 different questions."""


def test_a_seed_fixes_the_problems():
    config = Procedural("chain_sum", train_size=20, test_size=5, seed=3)
    assert [list(part) for part in load(config)] == [list(part) for part in load(config)]
    other = Procedural("chain_sum", train_size=20, test_size=5, seed=1000)
    assert load(config)[0][0] != load(other)[0][0]


def test_no_training_question_is_held_out_even_where_the_task_repeats_itself():
    train, test = load(Procedural("chain_sum", train_size=2000, test_size=60, settings=SMALL))
    assert (len(train), len(test)) == (2000, 60)
    questions = {p.question for p in train}
    assert questions.isdisjoint(p.question for p in test)
    assert len(questions) > 100


def test_a_task_with_too_few_questions_is_refused():
    settings = {"min_terms": 1, "max_terms": 1, "max_digits": 1}  # ten different questions
    train, _ = load(Procedural("chain_sum", train_size=50, test_size=500, settings=settings))
    with pytest.raises(DataError, match="too few different questions"):
        train[0]


def test_training_problems_are_generated_on_access():
    train, _ = load(Procedural("chain_sum", train_size=10**12, test_size=1))
    assert train[10**11].question != train[10**11 + 1].question
    assert train[-1] == train[10**12 - 1]
    with pytest.raises(IndexError):
        train[10**12]


def test_slices_and_iteration_agree_with_indices():
    train, _ = load(Procedural("chain_sum", train_size=7, test_size=2, settings=SMALL))
    assert list(train) == list(train[:]) == [train[i] for i in range(7)]
    assert list(train[-2::-2]) == [train[5], train[3], train[1]]


def test_problems_travel_between_processes():
    train, _ = load(Procedural("chain_sum", train_size=3, test_size=1))
    assert pickle.loads(pickle.dumps(train[2])) == train[2]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("4 + 3 - 7", "4+3=7\n7-7=0\n#### 0"),
        ("12 - 40 + 3", "12-40=-28\n-28+3=-25\n#### -25"),
        ("5", "#### 5"),
        ("-5 - -3", "-5--3=-2\n#### -2"),
    ],
)
def test_a_chain_sum_is_worked_as_running_sums(expression, expected):
    assert worked_solution("chain_sum", {"metadata": {"expression": expression}}) == expected


@pytest.mark.parametrize("task", WORKED)
@pytest.mark.parametrize("reward", [ExactAnswer(), ReasoningGym()])
def test_worked_solutions_earn_the_reward(task, reward):
    train, test = load(Procedural(task, train_size=200, test_size=50))
    verifier = build_verifier(reward)
    for problem in [*train, *test]:
        assert problem.solution is not None
        assert verifier.judge(problem, problem.solution, finished=True).correct


def test_a_task_without_worked_solutions_says_which_have_them():
    with pytest.raises(DataError, match=r"'spell_backward' has no worked solutions.*chain_sum"):
        worked_solution("spell_backward", {})
    (problem,), _ = load(Procedural("spell_backward", train_size=1, test_size=0))
    assert problem.solution is None


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("chain_sums", {}, "no task 'chain_sums'. did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "no setting 'max_term'. did you mean 'max_terms'"),
        ("chain_sum", {"seed": 3}, "no setting 'seed'"),
        ("chain_sum", {"min_terms": 5, "max_terms": 3}, "refuses the settings.*max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, "refuses the settings"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(task, settings, message):
    with pytest.raises(DataError, match=message):
        load(Procedural(task, settings=settings))
