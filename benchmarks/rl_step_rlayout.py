"""Our side of rl_step.py: one rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rl_step_common import LEARNING_RATE, SOURCE, Order, make_prompts, reward

from rlayout.algorithms.grpo import GroupAdvantages, Grpo
from rlayout.data.batch import Batch
from rlayout.model.generation import Generator
from rlayout.model.host_memory import keep_freed_memory, limit_compiled_products
from rlayout.model.huggingface import load_model
from rlayout.model.training import Trainer
from rlayout.spec.optimization import Optimization
from rlayout.spec.sampling import Sampling


def main() -> None:
    order = Order.read()
    keep_freed_memory()
    limit_compiled_products()
    torch.set_num_threads(order.threads)
    dist.init_process_group("gloo", init_method=order.meeting, rank=order.rank, world_size=order.ranks)
    model = load_model(SOURCE, dtype=order.torch_dtype)
    prompts = make_prompts(order, model.shape.max_positions)
    mine = prompts.select(range(order.rank, len(prompts), order.ranks))
    sampling = Sampling(max_new_tokens=order.new_tokens)  # no stop token: every answer is full
    grpo = Grpo(samples_per_prompt=order.samples)
    optimization = Optimization(learning_rate=LEARNING_RATE)
    trainer = Trainer(model, optimization, total_steps=order.runs + 1, group=dist.group.WORLD)
    seconds: dict[str, list[float]] = {"generate": [], "step": [], "processor": []}
    for step in range(order.runs + 1):
        dist.barrier()
        start, start_processor = time.perf_counter(), time.process_time()
        answers = Generator(model, max_cache_bytes=1 << 30).generate(
            mine, sampling=sampling, samples_per_prompt=order.samples, seed=0, step=step
        )
        seconds["generate"].append(time.perf_counter() - start)
        batch = _judged(answers, grpo)
        loss = grpo.build(sampling).losses["train"]
        result = trainer.step(batch, loss, micro_batch_tokens=order.micro_batch_tokens)
        seconds["step"].append(time.perf_counter() - start)
        used = torch.tensor(time.process_time() - start_processor)
        dist.all_reduce(used)
        seconds["processor"].append(float(used))
        if order.rank == 0:
            gap = result.statistics["logprob_gap_mean"].figure
            took = f"{seconds['step'][-1]:.1f} s ({float(used):.1f} s of processor)"
            print(f"rlayout step {step}: {took}, sampling to training gap {gap:.4f} nats", flush=True)
    dist.destroy_process_group()
    if order.rank == 0:
        Path(order.result).write_text(json.dumps(seconds))


def _judged(answers: Batch, grpo: Grpo) -> Batch:
    pairs = zip(answers.per_row("tokens"), answers.per_row("mask"), strict=True)
    rewards = torch.tensor([reward(tokens[mask].tolist()) for tokens, mask in pairs])
    advantages = GroupAdvantages(grpo.normalise_std, grpo.std_floor)
    return advantages(answers.with_values(rows={"rewards": rewards}))[0]


if __name__ == "__main__":
    main()
