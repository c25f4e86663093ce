"""Run the demo as a user does and measure it: seconds, peak memory of all its processes, accuracy gained.

    .venv/bin/python benchmarks/demo.py [key=value ...]

Memory is the sum of proportional set sizes (pages shared by several processes count once) of the command and
of every process that descends from it, sampled every two seconds. The last line is JSON:
{"seconds", "peak_memory_gib", "accuracy_before", "accuracy_after"}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run and report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [Path(sys.executable).with_name("rlayout"), "train", "recipes/demo.yaml", f"output={folder}"]
        start = time.perf_counter()
        process = subprocess.Popen([*command, *sys.argv[1:]], cwd=ROOT)
        peak, by_name = watch(process)
        seconds = time.perf_counter() - start
        if process.returncode:
            sys.exit(f"the demo failed with exit status {process.returncode}")
        before, after = accuracies(next(Path(folder).iterdir()))
    print(f"\n{'process':<24}{'peak GiB':>10}")
    for name, size in sorted(by_name.items(), key=lambda item: -item[1]):
        print(f"{name:<24}{size / 2**30:>10.2f}")
    figures = {
        "seconds": round(seconds, 1),
        "peak_memory_gib": round(peak / 2**30, 2),
        "accuracy_before": before,
        "accuracy_after": after,
    }
    print(json.dumps(figures))


def watch(command: subprocess.Popen[bytes]) -> tuple[int, dict[str, int]]:
    """Peak of the whole tree and, at that moment, bytes by process name, until it ends."""
    peak = 0
    at_peak: dict[str, int] = {}
    root = psutil.Process(command.pid)
    while command.poll() is None:
        sizes: dict[str, int] = {}
        for process in [root, *root.children(recursive=True)]:
            try:
                name = process.name()
                sizes[name] = sizes.get(name, 0) + process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # it ended between being listed and being read
        if sum(sizes.values()) > peak:
            peak, at_peak = sum(sizes.values()), sizes
        time.sleep(2.0)  # reading it costs processor time itself
    return peak, at_peak


def accuracies(run: Path) -> tuple[float, float]:
    """Held-out accuracy of the run's first and last evaluation."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [r["held_out/accuracy"] for r in records if "held_out/accuracy" in r]
    return found[0], found[-1]


if __name__ == "__main__":
    main()
