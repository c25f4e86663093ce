"""Batches of prompts to answer, and of worked solutions to imitate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlayout.data.batch import Batch
from rlayout.data.problem import Problem
from rlayout.data.templates import PromptEncoder, Tokenizer
from rlayout.errors import DataError


def prompt_batch(
    problems: Sequence[Problem],
    ids: Sequence[int],
    encoder: PromptEncoder,
    *,
    max_new_tokens: int,
    max_positions: int,
) -> Batch:
    """One row per problem, each a group of its own.

    Args:
        problems: B problems.
        ids: their row ids: global positions, so that no two prompts of a run share one.
        encoder: the tokenizer and template.
        max_new_tokens: how long an answer may become.
        max_positions: how many tokens the model can attend to.

    Returns:
        A batch with ``prompt_tokens`` [T] int64 per token and ``problem`` [B] per row.

    Raises:
        DataError: a prompt leaves no room for its answer.
    """
    rows = [encoder.prompt_ids(problem) for problem in problems]
    for row_id, row in zip(ids, rows, strict=True):
        if len(row) + max_new_tokens > max_positions:
            raise DataError(
                f"row {row_id}: {len(row)} prompt tokens + max_new_tokens {max_new_tokens} = "
                f"{len(row) + max_new_tokens}, but the model has max_positions {max_positions}. "
                "Lower max_new_tokens or leave out long prompts"
            )
    return _pack(ids, rows, problems, "prompt_tokens")


def supervised_batch(
    problems: Sequence[Problem],
    ids: Sequence[int],
    encoder: PromptEncoder,
    *,
    max_positions: int,
    end_token_id: int | None = None,
) -> Batch:
    """One row per problem: the same prompt as in ``prompt_batch``, the worked solution, the end token.

    Returns:
        A batch with ``tokens`` [T] int64 and ``mask`` [T] bool per token, true on the solution and the
        end token, and ``problem`` [B] per row.

    Raises:
        DataError: a problem without a worked solution, or a row longer than ``max_positions``.
    """
    rows, masks = [], []
    for row_id, problem in zip(ids, problems, strict=True):
        prompt = encoder.prompt_ids(problem)
        try:
            solution = encoder.solution_ids(problem, end_token_id)
        except DataError as error:
            raise DataError(f"row {row_id}: {error}") from error
        if len(prompt) + len(solution) > max_positions:
            raise DataError(
                f"row {row_id}: {len(prompt)} prompt tokens + {len(solution)} solution tokens = "
                f"{len(prompt) + len(solution)}, but the model has max_positions {max_positions}"
            )
        rows.append([*prompt, *solution])
        masks.append(torch.arange(len(rows[-1])) >= len(prompt))
    mask = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)
    return _pack(ids, rows, problems, "tokens").with_values(tokens={"mask": mask})


def answer_texts(answers: Batch, tokenizer: Tokenizer) -> list[str]:
    """The tokens under the mask of each row as text, without special tokens.

    Args:
        answers: with ``tokens`` [T] int64 and ``mask`` [T] bool, true on sampled tokens.
        tokenizer: of the model that sampled.
    """
    rows = zip(answers.per_row("tokens"), answers.per_row("mask"), strict=True)
    return [str(tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True)) for tokens, mask in rows]


def _pack(ids: Sequence[int], rows: list[list[int]], problems: Sequence[Problem], key: str) -> Batch:
    return Batch(
        ids=tuple(ids),
        groups=tuple(ids),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        tokens={key: torch.tensor([token for row in rows for token in row], dtype=torch.int64)},
        rows={"problem": tuple(problems)},
    )
