"""Check one accelerator against the CPU, then time it: parity, generation, a training step, reallocation.

    benchmarks/gpu_check.sh            # on a machine with CUDA
    python benchmarks/gpu_check.py --device cpu --small   # the same checks, to keep this script working

Exits with 1 when a check fails. The last line is JSON with the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from rlayout.algorithms.sft import SftLoss
from rlayout.data.batch import Batch
from rlayout.model.generation.engine import Generator
from rlayout.model.scoring import score
from rlayout.model.training import Trainer
from rlayout.model.transformer import Transformer
from rlayout.planning.transfer import holdings, plan_transfer
from rlayout.runtime.reallocation import digest, transfer
from rlayout.spec.layout import Layout, Placement
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.optimization import Optimization
from rlayout.spec.parameters import num_parameters, parameters
from rlayout.spec.sampling import Sampling

TINY = ModelShape(
    family="qwen3",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    qk_norm=True,
)
HALF_BILLION = replace(
    TINY,
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=24,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    max_positions=4096,
)


def main() -> None:
    """Run all checks and timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="time the tiny model, to test this script")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    checks = {
        "logprobs equal to the CPU's (float32, 1e-4)": same_logprobs(device),
        "greedy answers equal to the CPU's (float32)": same_answers(device, temperature=0.0),
        "sampled answers equal to the CPU's (float32)": same_answers(device, temperature=1.0),
        "training step equal to the CPU's (float32, 1e-4)": same_step(device),
        "reallocation on one device moves nothing": nothing_to_move(device),
    }
    figures = timings(device, TINY if options.small else HALF_BILLION)
    for name, passed in checks.items():
        print(f"{'ok    ' if passed else 'FAILED'} {name}")
    for name, value in figures.items():
        print(f"{name:<40}{value:>14,.1f}")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "passed": all(checks.values()), **figures}))
    sys.exit(0 if all(checks.values()) else 1)


def model(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The same random weights on every device."""
    made = Transformer(shape, dtype=dtype)
    made.init_weights(0, std=0.05)
    return made.to(device)


def rows(shape: ModelShape, lengths: list[int], prompt: int) -> Batch:
    """Random rows; what follows ``prompt`` tokens is under the mask."""
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= prompt for n in lengths])
    tokens = torch.randint(0, shape.vocab_size, (total,), generator=generator)
    ids = tuple(range(len(lengths)))
    return Batch(ids, ids, torch.tensor(lengths), {"tokens": tokens, "mask": mask})


def prompts(shape: ModelShape, count: int, length: int) -> Batch:
    """Random prompts of one length."""
    batch = rows(shape, [length] * count, length)
    return Batch(batch.ids, batch.groups, batch.lengths, {"prompt_tokens": batch.tokens["tokens"]})


def same_logprobs(device: torch.device) -> bool:
    """Whether a forward pass over packed rows gives the CPU's log-probabilities."""
    batch = rows(TINY, [5, 17, 40, 41], 3)
    found = [
        score(model(TINY, d, torch.float32), batch.to(d), need_gradient=False).logprobs.cpu()
        for d in (torch.device("cpu"), device)
    ]
    return torch.allclose(*found, rtol=0, atol=1e-4)


def same_answers(device: torch.device, temperature: float) -> bool:
    """Whether generation draws the CPU's tokens."""
    found = []
    for d in (torch.device("cpu"), device):
        generator = Generator(model(TINY, d, torch.float32), max_cache_bytes=2**22)
        sampling = Sampling(max_new_tokens=24, temperature=temperature)
        batch = prompts(TINY, 6, 9).to(d)
        answers = generator.generate(batch, sampling=sampling, samples_per_prompt=3, seed=0, step=0)
        found.append(answers.tokens["tokens"].cpu())
    return torch.equal(*found)


def same_step(device: torch.device) -> bool:
    """Whether an optimizer step gives the CPU's weights."""
    batch = rows(TINY, [5, 17, 40, 41], 3)
    found = []
    for d in (torch.device("cpu"), device):
        trainer = Trainer(model(TINY, d, torch.float32), Optimization(1e-3), total_steps=1, group=None)
        trainer.step(batch.to(d), SftLoss("token_mean"), micro_batch_tokens=64)
        found.append(torch.cat([p.detach().cpu().flatten() for p in trainer.model.parameters()]))
    return torch.allclose(*found, rtol=0, atol=1e-4)


def nothing_to_move(device: torch.device) -> bool:
    """Whether a transfer plan from a device to itself is empty and leaves the weights as they are."""
    held = {n: p.detach() for n, p in model(TINY, device, torch.bfloat16).named_parameters()}
    before = digest(held)
    place = holdings(TINY, Placement((0,), Layout(), 1024))
    received, _ = transfer(plan_transfer(parameters(TINY), place, place, lambda _: 0, 2), held, 0)
    return received == 0 and digest(held) == before


def timings(device: torch.device, shape: ModelShape) -> dict[str, float]:
    """Tokens per second of generation and of training in bfloat16, second run."""
    held = model(shape, device, torch.bfloat16)
    new_tokens, count = (16, 8) if shape is TINY else (256, 256)
    sampling = Sampling(max_new_tokens=new_tokens)
    batch = prompts(shape, count, 64 if shape is HALF_BILLION else 9).to(device)

    def generate() -> None:
        generator = Generator(held, max_cache_bytes=16 * 2**30)
        generator.generate(batch, sampling=sampling, samples_per_prompt=1, seed=0, step=0)

    trained = rows(shape, [320] * 64 if shape is HALF_BILLION else [25] * 8, 8).to(device)
    seconds = {"generate": second_run(generate, device)}
    trainer = Trainer(held, Optimization(1e-5), total_steps=2, group=None)
    loss = SftLoss("token_mean")
    seconds["train"] = second_run(lambda: trainer.step(trained, loss, micro_batch_tokens=8192), device)
    flops = 6 * num_parameters(shape) * trained.num_tokens
    return {
        "generated_tokens_per_second": count * new_tokens / seconds["generate"],
        "trained_tokens_per_second": trained.num_tokens / seconds["train"],
        "train_teraflops": flops / seconds["train"] / 1e12,
    }


def second_run(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the second of two runs."""
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    main()
