"""Batches of answers are decoded and judged row by row."""

from collections.abc import Sequence

import pytest
import torch

from rlayout.data.batch import Batch
from rlayout.data.problem import Problem
from rlayout.errors import RewardError
from rlayout.rewards.judge import Judge
from rlayout.rewards.verdict import Verdict
from rlayout.rewards.verifiers import build_verifier
from rlayout.spec.task import ExactAnswer, UserFunction
from tests.data.byte_tokenizer import EOS, ByteTokenizer

PROBLEM = Problem("#### 8", answer="7")
"""Its prompt holds an anchor: what the model did not write must not be judged."""


def answers(texts: Sequence[str], finished: Sequence[bool]) -> Batch:
    """Rows of the prompt and an answer, with an end token where the answer is finished."""
    prompt = list(PROBLEM.question.encode())
    rows = [[*prompt, *t.encode(), *[EOS] * f] for t, f in zip(texts, finished, strict=True)]
    mask = [[i >= len(prompt) for i in range(len(row))] for row in rows]
    return Batch(
        ids=tuple(range(10, 10 + len(rows))),
        groups=(10,) * len(rows),
        lengths=torch.tensor([len(row) for row in rows]),
        tokens={
            "tokens": torch.tensor([token for row in rows for token in row]),
            "mask": torch.tensor([value for row in mask for value in row]),
        },
        rows={"problem": (PROBLEM,) * len(rows), "finished": torch.tensor(finished)},
    )


def test_rows_get_rewards_texts_and_reasons():
    batch = answers(["#### 7", "#### 8", "#### 7", ""], [True, True, False, True])
    judged = Judge(build_verifier(ExactAnswer()), ByteTokenizer())(batch)
    assert judged.ids == batch.ids
    rewards, correct = judged.rows["rewards"], judged.rows["correct"]
    assert isinstance(rewards, torch.Tensor)
    assert isinstance(correct, torch.Tensor)
    assert (rewards.dtype, rewards.tolist()) == (torch.float32, [1.0, 0.0, 0.0, 0.0])
    assert (correct.dtype, correct.tolist()) == (torch.bool, [True, False, False, False])
    assert judged.rows["texts"] == ("#### 7", "#### 8", "#### 7", "")
    assert judged.rows["reasons"][2] == "cut by the length limit"


class Refuses:
    """Fails on one text."""

    def judge(self, problem: Problem, text: str, finished: bool) -> Verdict:
        if text == "b":
            raise RewardError("cannot judge b")
        return Verdict(1.0, True, "")


def test_a_failure_names_the_row():
    with pytest.raises(RewardError, match="row 11: cannot judge b"):
        Judge(Refuses(), ByteTokenizer())(answers(["a", "b", "c"], [True] * 3))


def test_a_user_function_that_returns_no_number_names_row_and_value(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def score(problem, text):\n    return float('nan') if text == 'b' else 1\n"
    )
    judge = Judge(build_verifier(UserFunction(f"{tmp_path}/reward.py:score")), ByteTokenizer())
    with pytest.raises(RewardError, match=r"row 11: .*score returned nan"):
        judge(answers(["a", "b"], [True, True]))
