"""From a problem to token ids: the prompt, and the worked solution that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlayout.data.problem import Problem
from rlayout.data.worked import WORKED
from rlayout.errors import DataError
from rlayout.spec.task import PromptTemplate


class Tokenizer(Protocol):
    """What is asked of a tokenizer: the part of Hugging Face's interface that is used here."""

    chat_template: Any
    """None if the tokenizer has none."""

    @property
    def eos_token_id(self) -> Any:
        """The end token, None if there is none."""
        ...

    def encode(self, text: Any, *, add_special_tokens: bool = True) -> Any:
        """Token ids of ``text``."""
        ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any:
        """Text of ``token_ids``."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool = False, tokenize: bool = True
    ) -> Any:
        """Text of a conversation, with the marks of its turns."""
        ...


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes problems with one tokenizer and one template."""

    tokenizer: Tokenizer
    template: PromptTemplate

    def __post_init__(self) -> None:
        if self.template.template == "chat" and not self.tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template. Use a model with one (instruct models have it), "
                "or set 'template: plain' for prompts of raw text"
            )

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of the prompt, up to where the model's answer begins."""
        if self.template.template == "chat":
            text = self.tokenizer.apply_chat_template(
                self.messages(problem), tokenize=False, add_generation_prompt=True
            )
            # The chat template writes the special tokens itself.
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        if problem.messages:
            raise DataError("template plain takes questions of one text, not messages; use 'template: chat'")
        question = _with_instruction(problem.question, self.template.instruction)
        ids = list(self.tokenizer.encode(self.template.format.replace("{question}", question)))
        if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:  # some tokenizers close every text
            ids.pop()
        return ids

    def messages(self, problem: Problem) -> list[Mapping[str, str]]:
        """The conversation that the model continues."""
        system = self.template.system
        turns = [{"role": m.role, "content": m.content} for m in problem.messages]
        turns = turns or [{"role": "user", "content": problem.question}]
        turns[-1]["content"] = _with_instruction(turns[-1]["content"], self.template.instruction)
        if system is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": system})
        return list(turns)

    def solution_ids(self, problem: Problem, end_token_id: int | None = None) -> list[int]:
        """Token ids of the worked solution and the end token (default: the tokenizer's).

        Encoded apart from the prompt, so that the prompt has the same tokens here and in generation.

        Raises:
            DataError: the problem has no worked solution, or no end token is known.
        """
        if problem.solution is None:
            raise DataError(
                "the problem has no worked solution to imitate. Name the column of a file with "
                f"'columns.solution'; procedural tasks with worked solutions: {', '.join(sorted(WORKED))}"
            )
        end = self.tokenizer.eos_token_id if end_token_id is None else end_token_id
        if end is None:
            raise DataError("the tokenizer has no end token; name one")
        return [*self.tokenizer.encode(problem.solution, add_special_tokens=False), int(end)]


def _with_instruction(question: str, instruction: str | None) -> str:
    return question if instruction is None else f"{question}\n{instruction}"
