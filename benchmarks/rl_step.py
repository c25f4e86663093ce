"""Seconds of one GRPO step against TRL's ``GRPOTrainer``, on SmolLM2-135M in bfloat16.

Run: ``python benchmarks/rl_step.py``. Both sides take the same weights, prompts and cores: 8 prompts, 8
answers each of exactly 128 tokens at temperature 1, rewards from a trivial function, one update of all
weights without a reference model. Ours: one process per core, each with its part of the prompts, sampling
with ``Generator`` and updating with ``Trainer``. TRL: one process with all cores, its default settings but for
the shape above, micro-batches of 8 answers and no gradient checkpointing. Runs of a side follow each other
after one to warm up; medians count. Processor seconds, of all processes of a side, tell the two apart where
a busy machine does not. On a processor that only emulates bfloat16 ours computes in float32, as a run does
there, and TRL is also measured in float32. The last line is JSON: "grpo_ratio" against TRL in bfloat16,
"grpo_ratio_best" against the faster of its dtypes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlayout.model.processor import multiplies_bfloat16

SAMPLES = 8
Seconds = dict[str, list[float]]
"""``generate``, ``step`` (all of it) and ``processor`` of every run; the first is to warm up."""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        ours = "bfloat16" if multiplies_bfloat16() else "float32"
        sides = {"rlayout": _start(options, "rlayout", ours, folder, options.runs, ranks=options.ranks)}
        for dtype in options.trl_dtypes or dict.fromkeys(("bfloat16", ours)):
            sides[f"trl {dtype}"] = _start(options, "trl", dtype, folder, options.trl_runs, ranks=1)
    _report(options, sides)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--ranks", type=int, default=os.cpu_count(), help="our processes")
    parser.add_argument("--micro-batch-tokens", type=int, default=3072)
    parser.add_argument("--runs", type=int, default=5, help="measured runs of ours, after one to warm up")
    parser.add_argument("--trl-runs", type=int, default=2, help="the same of TRL")
    parser.add_argument(
        "--trl-dtypes", nargs="*", choices=("bfloat16", "float32"), help="bfloat16 and what ours computes in"
    )
    return parser.parse_args()


def _start(
    options: argparse.Namespace, side: str, dtype: str, folder: str, runs: int, *, ranks: int
) -> Seconds:
    """Run a side in fresh processes, so that neither sees the other's threads or memory."""
    result = Path(folder) / f"{side}-{dtype}.json"
    threads = max(1, options.cores // ranks)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    order = {
        "result": str(result),
        "meeting": f"file://{folder}/meeting",
        "threads": threads,
        "ranks": ranks,
        "dtype": dtype,
        "runs": runs,
        "samples": SAMPLES,
        "prompts": options.prompts,
        "new_tokens": options.new_tokens,
        "micro_batch_tokens": options.micro_batch_tokens,
    }
    script = str(Path(__file__).with_name(f"rl_step_{side}.py"))
    processes = [
        subprocess.Popen([sys.executable, script, json.dumps({**order, "rank": rank})], env=environment)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            if process.wait() != 0:
                raise SystemExit(f"{side} failed")
    finally:
        for process in processes:
            process.kill()
    return json.loads(result.read_text())


def _report(options: argparse.Namespace, sides: dict[str, Seconds]) -> None:
    answers = options.prompts * SAMPLES
    table = Table(title=f"{answers} answers of {options.new_tokens} tokens, {options.cores} cores, medians")
    for column in (
        "side",
        "generate s",
        "train s",
        "step s",
        "processor s",
        "generated tok/s",
        "trained tok/s",
    ):
        table.add_column(column, justify="left" if column == "side" else "right")
    median = {
        name: {part: statistics.median(values[1:]) for part, values in seconds.items()}
        for name, seconds in sides.items()
    }
    tokens = answers * options.new_tokens
    for name, found in median.items():
        train = found["step"] - found["generate"]
        figures = (found["generate"], train, found["step"], found["processor"])
        rates = (tokens / found["generate"], tokens / train)
        table.add_row(name, *(f"{f:.1f}" for f in figures), *(f"{r:.0f}" for r in rates))
    Console(width=112).print(table)
    theirs = {name: found for name, found in median.items() if name != "rlayout"}
    fastest = min(theirs, key=lambda name: theirs[name]["step"])
    compared = {"grpo_ratio": ("trl bfloat16", "step"), "grpo_ratio_best": (fastest, "step")}
    compared["processor_ratio_best"] = (fastest, "processor")
    ratios = {
        key: round(median[name][part] / median["rlayout"][part], 2)
        for key, (name, part) in compared.items()
        if name in median
    }
    print(json.dumps({**ratios, "seconds": sides}))


if __name__ == "__main__":
    main()
