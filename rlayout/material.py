"""What a run learns from and is judged by: tokenizer, problems, verifier, as batches of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rlayout.data.batch import Batch
from rlayout.data.order import problems_at
from rlayout.data.problem import Problem
from rlayout.data.prompts import answer_texts, prompt_batch, supervised_batch
from rlayout.data.sources import load
from rlayout.data.templates import PromptEncoder
from rlayout.errors import DataError
from rlayout.model.huggingface import load_tokenizer
from rlayout.rewards.judge import Judge
from rlayout.rewards.verifiers import build_verifier
from rlayout.setup import Setup
from rlayout.spec.task import Procedural

HELD_OUT = 128
"""Held-out problems that are judged where the user does not say how many: +-9 points at 50 %."""


class Material:
    """Reads the tokenizer and the dataset once."""

    def __init__(self, setup: Setup) -> None:
        config = setup.config
        self._setup = setup
        self.tokenizer: Any = load_tokenizer(config.model.source)
        self._encoder = PromptEncoder(self.tokenizer, config.prompt)
        self._problems, held_out = load(config.dataset)
        wanted = config.evaluation.problems
        num_judged = min(HELD_OUT, len(held_out)) if wanted is None else wanted
        if len(held_out) < num_judged:
            raise DataError(
                f"evaluation.problems: {num_judged} held-out problems are wanted, but the "
                f"dataset has {len(held_out)}; choose at most that many (0 turns evaluation off)"
            )
        self._held_out = [held_out[i] for i in range(num_judged if config.reward else 0)]
        self.judge = Judge(build_verifier(config.reward), self.tokenizer) if config.reward else None

    def rows(self, source: tuple[str, ...], positions: range) -> Batch:
        """The rows at ``positions`` of the endless, shuffled sequence of training problems.

        Args:
            source: the keys that the dataflow reads from the dataset: prompts to answer or worked
                solutions to imitate.
            positions: global positions; they become the ids of the rows.
        """
        indices = problems_at(positions, len(self._problems), self._setup.config.seed)
        problems = [self._problems[i] for i in indices]
        if "prompt_tokens" in source:
            return self._prompts(problems, positions)
        stops = self._setup.sampling.stop_token_ids
        own = self.tokenizer.eos_token_id
        return supervised_batch(
            problems,
            positions,
            self._encoder,
            max_positions=self._setup.shape.max_positions,
            end_token_id=own if own in stops else stops[0],  # a token that ends generation too
        ).only(source)

    def check(self, source: tuple[str, ...], positions: range, rows_per_step: int) -> None:
        """Refuse problems that could not become rows, before anything is started.

        Of procedural tasks only the first step is generated: their settings bound all problems alike. Of
        files every problem of the run is looked at, because one of them may be far longer than the rest.

        Args:
            source: as in ``rows``.
            positions: all that a stage of the run will read.
            rows_per_step: how many of them are read at once.

        Raises:
            DataError: a problem is too long for the model, or lacks what ``source`` needs.
        """
        self.held_out_rows()
        self.rows(source, positions[:rows_per_step])
        if isinstance(self._setup.config.dataset, Procedural):
            return
        seen: set[int] = set()
        for position in positions:
            (index,) = problems_at(range(position, position + 1), len(self._problems), self._setup.config.seed)
            if index not in seen and self._may_be_too_long(self._problems[index]):
                self.rows(source, range(position, position + 1))
            seen.add(index)

    def _may_be_too_long(self, problem: Problem) -> bool:
        """Cheap and on the safe side: no tokenizer makes more tokens than there are bytes."""
        num_bytes = len(f"{problem.question}{problem.solution or ''}".encode())
        room = self._setup.shape.max_positions - self._setup.sampling.max_new_tokens - self._template_tokens
        return bool(problem.messages) or num_bytes > room

    @cached_property
    def _template_tokens(self) -> int:
        return len(self._encoder.prompt_ids(Problem("")))

    @property
    def num_held_out(self) -> int:
        """How many held-out problems are judged; 0 without a reward."""
        return len(self._held_out)

    def held_out_rows(self) -> Batch:
        """All held-out problems as prompts."""
        return self._prompts(self._held_out, range(len(self._held_out)))

    def prompts_of(self, questions: Sequence[str]) -> Batch:
        """Questions of a user's own as prompts."""
        return self._prompts([Problem(question) for question in questions], range(len(questions)))

    def texts(self, answers: Batch) -> list[str]:
        """The sampled tokens of each row as text, without special tokens."""
        return answer_texts(answers, self.tokenizer)

    def _prompts(self, problems: Sequence[Problem], ids: range) -> Batch:
        return prompt_batch(
            problems,
            ids,
            self._encoder,
            max_new_tokens=self._setup.sampling.max_new_tokens,
            max_positions=self._setup.shape.max_positions,
        )
