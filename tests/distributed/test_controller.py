"""Whole steps on real workers: the same results under every plan, and receipts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlayout.algorithms import Grpo
from rlayout.errors import RewardError, WeightVersionError
from rlayout.runtime.session import Session
from tests import tiny
from tests.distributed.stage import (
    MODEL_BYTES,
    QUESTIONS,
    SAMPLING,
    grpo,
    new_session,
    placement,
    prompts,
    start,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with new_session(4) as started:
        yield started


PLANS = {
    "one device": (placement(0), placement(0), placement(0)),
    "all on four": (placement(0, 1, 2, 3), placement(0, 1, 2, 3), placement(3, 1, 0, 2, tokens=40)),
    "generate wider than train": (placement(0, 1, 2), placement(3), placement(2, 3)),
    "train wider than generate": (placement(1), placement(0, 2), placement(0, 1, 3, tokens=30)),
    "nothing in common": (placement(2, 3), placement(2), placement(0, 1)),
}


@pytest.fixture(scope="module")
def outcomes(
    session: Session, source: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Two GRPO steps under every plan."""
    found = {}
    for name, (generate, ref, train) in PLANS.items():
        trial = start(session, source, grpo(), {"generate": generate, "ref_infer": ref, "train": train})
        steps = [trial.step(step, prompts(*QUESTIONS)) for step in range(2)]
        folder = tmp_path_factory.mktemp("weights") / "actor"
        trial.controller.save("actor", folder, tiny.tokenizer())
        found[name] = {
            "answers": [s.fetch(("tokens", "mask", "rewards", "advantages", "ref_logprobs")) for s in steps],
            "statistics": [s.statistics["train"] for s in steps],
            "receipts": [s.receipts for s in steps],
            "weights": load_file(folder / "model.safetensors"),
            "source": load_file(Path(source) / "model.safetensors"),
        }
    return found


@pytest.mark.parametrize("name", [n for n in PLANS if n != "one device"])
def test_every_plan_gives_the_same_results(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    expected, found = outcomes["one device"], outcomes[name]
    for one, other in zip(expected["answers"], found["answers"], strict=True):
        assert other.ids == one.ids
        assert torch.equal(other.tokens["tokens"], one.tokens["tokens"])
        assert torch.equal(other.numbers("rewards"), one.numbers("rewards"))
        torch.testing.assert_close(other.tokens["ref_logprobs"], one.tokens["ref_logprobs"], rtol=0, atol=1e-5)
    for one, other in zip(expected["statistics"], found["statistics"], strict=True):
        for figure in ("loss", "grad_norm", "entropy", "kl_ref", "clip_high"):
            assert other[figure].figure == pytest.approx(one[figure].figure, rel=1e-4, abs=1e-6), figure
    for key, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], tensor, rtol=0, atol=1e-5)


def test_the_steps_did_learn_something(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes["one device"]
    moved = [float((outcome["weights"][k] - w).abs().max()) for k, w in outcome["source"].items()]
    assert min(moved) > 1e-4
    assert {len(a) for a in outcome["answers"]} == {4 * len(QUESTIONS)}


def test_receipts_name_version_and_bytes(outcomes: dict[str, dict[str, Any]]) -> None:
    first, second = outcomes["nothing in common"]["receipts"]
    assert first == []  # every device read version 0 from disk
    by_device = {r.device: r for r in second}
    assert sorted(by_device) == [0, 1, 2, 3]
    assert {r.version for r in second} == {1}
    assert len({r.digest for r in second}) == 1
    assert [by_device[d].bytes_received for d in range(4)] == [0, 0, MODEL_BYTES, MODEL_BYTES]
    assert [by_device[d].bytes_needed for d in range(4)] == [0, 0, MODEL_BYTES, MODEL_BYTES]


def test_nothing_moves_where_training_left_the_weights(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["all on four"]["receipts"] == [[], []]


def test_other_weights_than_the_plan_s_are_refused(session: Session, source: str) -> None:
    plan = {"generate": placement(2, 3), "ref_infer": placement(0), "train": placement(0, 1)}
    trial = start(session, source, grpo(), plan)
    trial.step(0, prompts(*QUESTIONS))
    trial.controller._versions["actor"] = dict.fromkeys(range(4), 1)  # pretend that the weights were moved
    with pytest.raises(
        WeightVersionError, match=r"'generate' of step 1 needs version 1 .* device [23] holds version 0"
    ):
        trial.step(1, prompts(*QUESTIONS))


def test_independent_calls_on_disjoint_meshes_overlap(session: Session, source: str) -> None:
    # The reference model scores on device 3 while the actor, asked because of top-k, scores on device 2.
    algorithm = Grpo(samples_per_prompt=16, kl_coef=0.05).build(replace(SAMPLING, top_k=40))
    plan = {
        "generate": placement(0, 1),
        "ref_infer": placement(3, tokens=16),
        "actor_infer": placement(2, tokens=16),
        "train": placement(0, 1),
    }
    result = start(session, source, algorithm, plan).step(0, prompts(*QUESTIONS * 4))
    ref, actor = result.usages["ref_infer"][3], result.usages["actor_infer"][2]
    assert max(ref.start, actor.start) < min(ref.start + ref.seconds, actor.start + actor.seconds)


def test_a_failing_reward_is_one_error_that_names_the_row(session: Session, source: str) -> None:
    plan = {"generate": placement(0, 1), "ref_infer": placement(0, 1), "train": placement(0, 1)}
    trial = start(session, source, grpo(), plan)
    with pytest.raises(RewardError, match=r"row 4: this reward function fails on purpose"):
        trial.step(0, prompts("1+1=", "raise"))
