"""Bad input: one message that says what, where and what would be right; nothing is started, nothing is left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from rlayout.cli import app
from tests import tiny
from tests.command_line import PLAN, REWARD, environment, rlayout, settings, write


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def refusal(home: Path, *overrides: str, command: str = "train", **changes: Any) -> str:
    """What ``rlayout`` prints on refusing a configuration; starts nothing and makes no run folder."""
    config = write(home / "bad.yaml", settings(home, **changes))
    return refused(home, command, str(config), *overrides)


def refused(home: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1, result.output
    assert re.match(r"\w+Error: ", result.stderr), result.stderr
    assert "Traceback" not in result.output
    assert not (home / "runs").exists()
    assert not ray.is_initialized()
    return result.stderr


SETTINGS = {
    "unknown key": (["stepz=3"], r"ConfigError: stepz: unknown key. did you mean 'steps'\?"),
    "unknown nested key": (["optimizer.lr=1"], r"optimizer\.lr: unknown key.*learning_rate"),
    "wrong type": (["steps=many"], "steps: expected int, got 'many'"),
    "bad override": (["steps"], r"override 'steps': expected key=value"),
    "broken override": (["steps=["], r"override 'steps=\[': the value is not YAML"),
    "indivisible": (["algorithm.updates_per_step=5"], "16 rows.*divided into 5.*nearest that fits is 4"),
    "no reward": (["reward=null"], "grpo learns from rewards: add a 'reward' section"),
    "greedy": (["sampling.temperature=0"], "sampling.temperature: .*choose a temperature above 0"),
    "no room": (["sampling.max_new_tokens=256"], "max_new_tokens: 256 leaves no room.*context of 256"),
    "no plan file": (["plan=nope.yaml"], "PlanError: no plan file nope.yaml"),
    "no model": (["model.source=nope"], "ModelError: model 'nope': no such folder or file"),
    "unknown task": (["dataset.task=chain_su"], "no task 'chain_su'. did you mean 'chain_sum'"),
    "task setting": (["dataset.settings.min_terms=9"], "max_terms must be >= min_terms"),
    "setting of a section": (["learning_rate=1"], "unknown key. did you mean 'optimizer.learning_rate'"),
    "nobody listens": (["cluster.address=127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    "too few held out": (["evaluation.problems=9"], "9 held-out problems are wanted, but the dataset has 8"),
    "long prompt": (["sampling.max_new_tokens=250"], r"tokens \+ max_new_tokens 250 = \d+.*max_positions 256"),
    "no reward file": (["reward.function=nope.py:pays"], "reward: no file .*nope.py"),
    "no reward function": (["reward.function=math:pays"], "reward: math has no function 'pays'. .*pow"),
    "nodes without a cluster": (["cluster.nodes=2"], "2 nodes need 'address' of a running Ray cluster"),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), SETTINGS.values(), ids=SETTINGS.keys())
def test_settings(home: Path, overrides: list[str], message: str) -> None:
    assert re.search(message, refusal(home, *overrides), re.DOTALL)


def test_a_missing_configuration_names_those_that_are_there(home: Path) -> None:
    write(home / "mine.yaml", settings(home))
    assert "no configuration file" in (message := refused(home, "train", str(home / "mein.yaml")))
    assert "did you mean 'mine.yaml'?" in message


def test_broken_yaml_names_the_line(home: Path) -> None:
    (home / "bad.yaml").write_text("steps: 3\nmodel: {source: x\nseed: 1\n")
    assert re.search(r"bad\.yaml: .*line [23]", refused(home, "train", str(home / "bad.yaml")), re.DOTALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["calls"].update(score=p["calls"]["train"]), "calls.score: .* no such model call"),
        (lambda p: p["calls"].pop("train"), "calls.train: missing"),
        (lambda p: p["calls"]["train"].update(devices=[2]), r"train\.devices: device 2 is outside .*0 to 1"),
        (lambda p: p["calls"]["train"].update(layout="d2"), "layout d2 needs 2 devices.* has 1"),
        (lambda p: p["calls"]["generate"].update(layout="t2"), "d1t2 splits the model, .* so far: d2"),
        (lambda p: p.update(call={}), r"plan\.call: unknown key. did you mean 'calls'"),
    ],
)
def test_plans(home: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    plan = json.loads(json.dumps(PLAN))
    change(plan)
    write(home / "plan.yaml", plan)
    algorithm = {"name": "grpo", "samples_per_prompt": 4, "kl_coef": 0.1}
    text = refusal(home, algorithm=algorithm, plan=str(home / "plan.yaml"), cluster={"workers": 2})
    assert re.match(rf"PlanError: {home}/plan.yaml: |PlanError: plan: calls", text)
    assert re.search(message, text)


def change_json(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_a_truncated_weight_file_is_found_before_anything_starts(home: Path) -> None:
    file = home / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is truncated or damaged" in refusal(home)


def test_missing_weights(home: Path) -> None:
    (home / "model" / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(home)


def test_weights_of_another_model(home: Path) -> None:
    change_json(home / "model" / "config.json", num_hidden_layers=3)
    assert re.search(r"9 tensors are missing, the first is 'model\.layers\.2\.", refusal(home))
    change_json(home / "model" / "config.json", num_hidden_layers=1)
    assert "unexpected tensor 'model.layers.1." in refusal(home)
    change_json(home / "model" / "config.json", num_hidden_layers=2, intermediate_size=80)
    assert re.search(r"has shape \[.*96.*\], the config says \[.*80.*\]", refusal(home))


def test_an_unknown_architecture(home: Path) -> None:
    change_json(home / "model" / "config.json", model_type="lama")
    assert "model_type 'lama' is not supported; did you mean 'llama'?" in refusal(home)


def test_a_model_without_an_end_token(home: Path) -> None:
    change_json(home / "model" / "tokenizer_config.json", eos_token=None)
    change_json(home / "model" / "generation_config.json", eos_token_id=None)
    assert "sampling.stop_token_ids: the model" in refusal(home)


def test_a_tokenizer_without_a_chat_template(home: Path) -> None:
    tiny.model_folder(home / "raw", chat=False)
    message = refusal(home, f"model.source={home / 'raw'}", prompt={"template": "chat"})
    assert "the tokenizer has no chat template" in message
    assert "template: plain" in message


def file_dataset(home: Path, rows: list[Any], **columns: str | None) -> dict[str, Any]:
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"name": "file", "train": str(home / "train.jsonl"), "columns": columns}
    return {"dataset": dataset, "evaluation": {"problems": 0}}


def test_a_dataset_without_the_column(home: Path) -> None:
    message = refusal(home, **file_dataset(home, [{"quest": "1+1", "answer": 2}]))
    assert re.search(r"line 1: no column 'question'. did you mean 'quest'\?", message)


def test_an_empty_dataset(home: Path) -> None:
    assert "train.jsonl: the dataset is empty" in refusal(home, **file_dataset(home, []))


def test_messages_need_a_chat_template(home: Path) -> None:
    asked = [{"question": [{"role": "user", "content": "1+1"}], "answer": 2}]
    assert "template plain takes questions of one text" in refusal(home, **file_dataset(home, asked))


def test_one_long_prompt_of_many_is_found_before_anything_starts(home: Path) -> None:
    rows = [{"question": "1+1", "answer": 2}] * 90 + [{"question": "1" * 300, "answer": 1}]
    message = refusal(home, "steps=50", **file_dataset(home, rows))
    assert "300 prompt tokens + max_new_tokens 12 = 312" in message


def test_a_warm_up_without_solutions(home: Path) -> None:
    rows = [{"question": "1+1", "answer": 2}] * 4
    message = refusal(home, **file_dataset(home, rows), warmup={"steps": 1, "rows_per_step": 2})
    assert "no worked solution to imitate" in message
    assert "columns.solution" in message


def test_more_workers_than_cores_are_warned_of(home: Path) -> None:
    config = write(home / "many.yaml", settings(home, cluster={"workers": 512}))
    result = CliRunner().invoke(app, ["show", str(config)])
    assert result.exit_code == 0, result.output
    assert re.search(r"512 workers share\s+\d+ cores", result.output)


def test_commands_that_lack_their_input(home: Path) -> None:
    config = write(home / "good.yaml", settings(home))
    assert "give at least one question" in refused(home, "generate", str(config))
    assert "is not the folder of a run" in refused(home, "show", str(home), "--samples")
    run = home / "a-run"
    run.mkdir()
    write(run / "config.yaml", settings(home))
    assert f"run {run} has no checkpoint" in refused(home, "evaluate", str(run))


@pytest.mark.slow
def test_a_wrong_key_is_refused_before_slow_imports(home: Path) -> None:
    config = write(home / "bad.yaml", settings(home, stepz=1))
    slow = ["ray", "transformers", "tensorboard", "reasoning_gym", "torch.utils.tensorboard"]
    script = f"""
import sys
from typer.testing import CliRunner
from rlayout.cli import app
result = CliRunner().invoke(app, ["train", {str(config)!r}])
assert result.exit_code == 1 and "stepz" in result.stderr, result.output
print([m for m in {slow} if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.slow
def test_a_reward_function_that_raises_ends_the_run(home: Path) -> None:
    function = {"name": "function", "function": f"{home / 'reward.py'}:broken"}
    done = rlayout("train", write(home / "tiny.yaml", settings(home, reward=function)))
    assert done.returncode == 1
    assert re.match(r"RewardError: row \d+: reward function .*reward\.py:broken failed", done.stderr)
    assert "KeyError: 'no such thing'" in done.stderr
    assert "ray" not in done.stderr
