"""Judging a batch of answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlayout.data.batch import Batch
from rlayout.data.prompts import answer_texts
from rlayout.data.templates import Tokenizer
from rlayout.errors import RewardError
from rlayout.rewards.verifiers import Verdict, Verifier


@dataclass(frozen=True)
class Judge:
    """Decodes the answers of a batch and has them judged one by one."""

    verifier: Verifier
    tokenizer: Tokenizer

    def __call__(self, batch: Batch) -> Batch:
        """Judge every row.

        Args:
            batch: with ``tokens`` [T] int64 and ``mask`` [T] bool (true on sampled tokens) per token,
                ``problem`` [B] and ``finished`` [B] bool per row.

        Returns:
            The same rows with ``rewards`` [B] float32, ``correct`` [B] bool, ``texts`` and ``reasons``
            (tuples of B texts).

        Raises:
            RewardError: the judging of a row failed; the message names the row.
        """
        texts = answer_texts(batch, self.tokenizer)
        problems, finished = batch.rows["problem"], batch.rows["finished"]
        verdicts = [self._judge(*row) for row in zip(batch.ids, problems, texts, finished, strict=True)]
        return batch.with_values(
            rows={
                "rewards": torch.tensor([v.reward for v in verdicts], dtype=torch.float32),
                "correct": torch.tensor([v.correct for v in verdicts], dtype=torch.bool),
                "texts": tuple(texts),
                "reasons": tuple(v.reason for v in verdicts),
            }
        )

    def _judge(self, row_id: int, problem, text: str, finished) -> Verdict:
        try:
            return self.verifier.judge(problem, text, bool(finished))
        except RewardError as error:
            raise RewardError(f"row {row_id}: {error}") from error
