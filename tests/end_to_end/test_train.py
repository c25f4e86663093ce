"""A run from the configuration file to the checkpoint, and what its user finds afterwards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlayout.config import load_config
from rlayout.run_folder import last_checkpoint, read_records
from rlayout.spec.plan import ExecutionPlan
from tests import tiny
from tests.command_line import PLAN, REWARD, only_run, rlayout, settings, write

pytestmark = pytest.mark.slow

STEPS = 3
STEP_FIGURES = {
    "answers/reward",
    "answers/accuracy",
    "answers/tokens_mean",
    "answers/tokens_max",
    "answers/truncated",
    "train/loss",
    "train/kl_ref",
    "train/kl_sampling",
    "train/entropy",
    "train/clip_low",
    "train/clip_high",
    "train/logprob_gap_mean",
    "train/logprob_gap_max",
    "train/grad_norm",
    "advantages/no_signal",
    "seconds/step",
    *(f"seconds/{call}" for call in ("generate", "ref_infer", "reward", "advantages", "train")),
    *(f"tokens_per_second/{call}" for call in ("generate", "ref_infer", "train")),
    *(f"peak_memory_gib/{process}" for process in ("host", "worker_0", "worker_1")),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tiny.model_folder(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def config(home: Path) -> Path:
    """Warm-up and GRPO with a reference, two workers, weights that move every step."""
    plan = write(home / "plan.yaml", PLAN)
    changes: dict[str, Any] = {
        "warmup": {"steps": 40, "rows_per_step": 16, "optimizer": {"learning_rate": 1e-2}},
        "algorithm": {"name": "grpo", "samples_per_prompt": 4, "kl_coef": 0.05},
        "steps": STEPS,
        "sampling": {"max_new_tokens": 24},
        "evaluation": {"problems": 8, "every_steps": 1},
        "checkpoints": {"every_steps": 1, "keep": 2},
        "cluster": {"workers": 2},
        "plan": str(plan),
        "seed": 7,
        "output": str(home / "first"),
    }
    return write(home / "tiny.yaml", settings(home, **changes))


@pytest.fixture(scope="module")
def output(config: Path) -> str:
    """What the run printed."""
    done = rlayout("train", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def run(home: Path, output: str) -> Path:
    del output
    return only_run(home / "first")


def test_a_log_holds_one_line_per_step_and_evaluation(output: str, run: Path) -> None:
    lines = output.splitlines()
    assert lines[0] == f"run folder: {run}"
    assert sum(line.startswith("warmup ") for line in lines) == 40
    assert sum(line.startswith("grpo ") for line in lines) == STEPS
    assert len([line for line in lines if line.startswith("held-out accuracy")]) == STEPS + 1
    assert f"checkpoint   {run}/checkpoints/step-{STEPS}  (loads in transformers)" in lines
    assert len(lines) < 40 + 30


def test_config_and_plan_are_read_back_equal(run: Path, config: Path) -> None:
    assert load_config(run / "config.yaml") == load_config(config)
    written = yaml.safe_load((run / "plan.yaml").read_text())
    assert ExecutionPlan.from_plain(written) == ExecutionPlan.from_plain(PLAN)


def test_every_promised_figure_is_logged(run: Path) -> None:
    records = read_records(run / "metrics.jsonl")
    steps = [r for r in records if r["stage"] == "grpo" and "train/loss" in r]
    assert [r["step"] for r in steps] == list(range(STEPS))
    for record in steps:
        assert record.keys() >= STEP_FIGURES
        assert 0 <= record["answers/reward"] <= 1
        assert 0 < record["answers/tokens_mean"] <= record["answers/tokens_max"] <= 24
        assert record["tokens_per_second/generate"] > 0
        assert 0 < record["peak_memory_gib/worker_1"] < 8
        assert 0 <= record["advantages/no_signal"] < 1
        assert record["train/grad_norm"] > 0
    losses = [r["train/loss"] for r in records if r["stage"] == "warmup"]
    assert losses[-1] < 0.5 * losses[0]


def test_sampling_and_training_agree(run: Path) -> None:
    """With one update per step every token is scored by the very weights that sampled it."""
    records = read_records(run / "metrics.jsonl")
    gaps = [r["train/logprob_gap_max"] for r in records if "train/logprob_gap_max" in r]
    assert len(gaps) == STEPS
    # Both run one model in float32 (docs/design.md, invariant 4).
    assert max(gaps) < 1e-4


def test_tensorboard_has_the_figures_too(run: Path) -> None:
    (events,) = (run / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"grpo/answers/reward" in content
    assert b"warmup/train/loss" in content


def test_receipts_say_what_moved(run: Path) -> None:
    receipts = read_records(run / "receipts.jsonl")
    moved = [r for r in receipts if r["stage"] == "grpo" and r["bytes_received"]]
    # Worker 1 generates but does not train: it needs new weights after every step of training.
    assert {r["device"] for r in moved} == {1}
    assert [r["version"] for r in moved] == list(range(1, STEPS + 1))
    for receipt in receipts:
        same = {r["digest"] for r in receipts if r["version"] == receipt["version"]}
        assert same == {receipt["digest"]}
        assert receipt["bytes_received"] == receipt["bytes_needed"]
        assert receipt["seconds"] > 0


def test_the_timeline_says_who_computed_when(run: Path) -> None:
    spans = [s for s in read_records(run / "timeline.jsonl") if s["stage"] == "grpo"]
    assert {s["device"] for s in spans if s["call"] == "generate"} == {0, 1}
    assert {s["device"] for s in spans if s["call"] == "train"} == {0}
    assert all(s["seconds"] > 0 and s["start"] > 1e9 for s in spans)


def test_only_the_newest_checkpoints_stay(run: Path) -> None:
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step-{STEPS - 1}", f"step-{STEPS}"]


def test_a_checkpoint_is_the_same_model_in_transformers(run: Path) -> None:
    folder = last_checkpoint(run)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, loading = loaded
    assert not any(loading.values()), loading
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = "State the final answer: 3 + 4 ="
    ids = torch.tensor([tokenizer.encode(question)])
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(answer, skip_special_tokens=True)
    assert expected, "the model answers nothing, so this compares nothing"

    done = rlayout("generate", run, "--greedy", "--prompt", question)
    assert done.returncode == 0, done.stdout + done.stderr
    header, _, text = done.stdout.partition("\n")
    assert question in header
    assert text.rstrip("\n") == expected.rstrip("\n")


def test_evaluate_measures_the_last_checkpoint_again(run: Path, home: Path) -> None:
    done = rlayout("evaluate", run, f"output={home / 'evaluations'}")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(home / "evaluations")
    assert folder.name.startswith(f"{run.name}-evaluation-")
    (again,) = read_records(folder / "metrics.jsonl")
    last = [r for r in read_records(run / "metrics.jsonl") if "held_out/accuracy" in r][-1]
    assert last["step"] == STEPS
    assert {k: v for k, v in again.items() if k != "step"} == {k: v for k, v in last.items() if k != "step"}
    assert texts(read_records(folder / "samples.jsonl")) == texts(
        [s for s in read_records(run / "samples.jsonl") if s["stage"] == "held out after grpo"]
    )


def test_show_prints_a_runs_answers(run: Path) -> None:
    done = rlayout("show", run, "--samples", "--last", 3)
    assert done.returncode == 0, done.stderr
    titles = re.findall(r"held out after grpo step (\d+) row (\d+)", done.stdout)
    assert titles == [(str(STEPS), row) for row in ("5", "6", "7")]
    assert "expected" in done.stdout


def test_show_prints_the_setup_of_a_run(run: Path) -> None:
    done = rlayout("show", run)
    assert done.returncode == 0, done.stderr
    assert f"source: {load_config(run / 'config.yaml').model.source}" in done.stdout
    assert re.search(r"generate +generate +actor +0-1 +d2 +512", done.stdout)


def test_the_same_seed_gives_the_same_run(run: Path, config: Path, home: Path) -> None:
    done = rlayout("train", config, f"output={home / 'second'}", "evaluation.problems=0")
    assert done.returncode == 0, done.stdout + done.stderr
    again = only_run(home / "second")
    mine, others = (
        [s for s in read_records(r / "samples.jsonl") if s["stage"] == "grpo"] for r in (run, again)
    )
    assert mine == others
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, weights(again)[name]), name


def test_supervised_training_on_a_file(home: Path) -> None:
    sums = [(a, b) for a in range(5) for b in range(5)]
    rows = [{"ask": f"{a} + {b} =", "key": str(a + b), "work": f"#### {a + b}"} for a, b in sums]
    for name, part in (("train", rows[:20]), ("test", rows[20:])):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    changes: dict[str, Any] = {
        "dataset": {
            "name": "file",
            "train": str(home / "train.jsonl"),
            "test": str(home / "test.jsonl"),
            "columns": {"question": "ask", "answer": "key", "solution": "work"},
        },
        "prompt": {"template": "chat"},
        "reward": {"name": "exact", "anchors": ["hashes"]},
        "algorithm": {"name": "sft"},
        "steps": 60,
        "prompts_per_step": 10,
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"problems": 5},
        "output": str(home / "sft"),
    }
    config = write(home / "sft.yaml", settings(home, **changes))
    done = rlayout("train", config)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(home / "sft")
    losses = [r["train/loss"] for r in read_records(run / "metrics.jsonl") if "train/loss" in r]
    assert len(losses) == 60
    assert losses[-1] < 0.2 * losses[0]
    # It has learned the form of an answer: the verifier finds one in every text, right or wrong.
    after = [s for s in read_records(run / "samples.jsonl") if s["stage"] == "held out after sft"]
    assert len(after) == 5
    assert all(s["text"].startswith("#### ") for s in after)


def test_equal_rewards_teach_nothing(home: Path) -> None:
    """Not even a NaN: advantages are zero and the weights stay what they were, bit by bit."""
    changes = {
        "reward": {"name": "function", "function": f"{home / 'reward.py'}:constant"},
        "steps": 1,
        "output": str(home / "constant"),
    }
    done = rlayout("train", write(home / "constant.yaml", settings(home, **changes)))
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(home / "constant")
    (record,) = (r for r in read_records(run / "metrics.jsonl") if "train/loss" in r)
    assert record["advantages/no_signal"] == 1
    assert record["train/loss"] == 0
    assert record["train/grad_norm"] == 0
    before = load_file(home / "model" / "model.safetensors")
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, before[name]), name


def texts(samples: list[dict[str, Any]]) -> list[str]:
    return [s["text"] for s in samples]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(last_checkpoint(run) / "model.safetensors")
