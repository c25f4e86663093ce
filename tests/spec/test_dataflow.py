"""The dataflow: edges from keys, and every way in which calls do not form one."""

from __future__ import annotations

import pytest

from rlayout.errors import DataflowError
from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.sampling import Sampling

GENERATE = Call(
    "generate", Kind.GENERATE, role="actor", inputs=("prompts",), outputs=("tokens",), sampling=Sampling()
)
REWARD = Call("reward", Kind.REWARD, inputs=("tokens",), outputs=("rewards",))
TRAIN = Call("train", Kind.TRAIN, role="actor", inputs=("tokens", "rewards"))


def test_edges_follow_from_keys() -> None:
    flow = Dataflow((TRAIN, REWARD, GENERATE), source=("prompts",))
    assert flow.order == ("generate", "reward", "train")
    assert flow.predecessors("reward") == ("generate",)
    assert flow.predecessors("train") == ("reward", "generate")
    assert flow.producer == {"prompts": None, "tokens": "generate", "rewards": "reward"}


def test_independent_calls_keep_their_given_order() -> None:
    calls = [
        Call(f"infer_{i}", Kind.INFER, role=f"role_{i}", inputs=("tokens",), outputs=(f"out_{i}",))
        for i in (3, 1, 2)
    ]
    flow = Dataflow((GENERATE, *calls), source=("prompts",))
    assert flow.order == ("generate", "infer_3", "infer_1", "infer_2")


def test_training_waits_for_the_other_calls_of_its_role() -> None:
    old = Call("old", Kind.INFER, role="actor", inputs=("tokens",), outputs=("old_logprobs",))
    flow = Dataflow((TRAIN, old, GENERATE, REWARD), source=("prompts",))
    assert "old" in flow.predecessors("train")
    assert flow.order.index("old") < flow.order.index("train")


def test_a_key_that_nobody_produces_is_named_with_the_nearest() -> None:
    with pytest.raises(DataflowError, match=r"'reward' reads 'token', which nobody produces.*'tokens'"):
        Dataflow((GENERATE, Call("reward", Kind.REWARD, inputs=("token",), outputs=("r",))), ("prompts",))


def test_two_producers_of_a_key_are_named() -> None:
    again = Call("again", Kind.REWARD, inputs=("tokens",), outputs=("rewards",))
    with pytest.raises(DataflowError, match="'rewards' is produced by call 'reward' and by call 'again'"):
        Dataflow((GENERATE, REWARD, again), ("prompts",))


def test_a_call_may_not_produce_what_the_dataset_has() -> None:
    with pytest.raises(DataflowError, match="'tokens' is produced by the dataset and by call 'generate'"):
        Dataflow((GENERATE,), ("prompts", "tokens"))


def test_a_cycle_names_the_keys() -> None:
    one = Call("one", Kind.COMPUTE, inputs=("b",), outputs=("a",))
    two = Call("two", Kind.COMPUTE, inputs=("a",), outputs=("b",))
    with pytest.raises(DataflowError, match=r"circle.*through '[ab]'.*through '[ab]'"):
        Dataflow((one, two), ())


def test_two_calls_of_one_name() -> None:
    with pytest.raises(DataflowError, match="two calls are named 'reward'"):
        Dataflow((GENERATE, REWARD, REWARD), ("prompts",))


def test_a_model_call_needs_a_role_and_a_reward_has_none() -> None:
    with pytest.raises(DataflowError, match="needs a role"):
        Call("infer", Kind.INFER)
    with pytest.raises(DataflowError, match="takes no role"):
        Call("reward", Kind.REWARD, role="actor")


def test_an_unknown_call_is_answered_with_the_nearest() -> None:
    flow = Dataflow((GENERATE, REWARD, TRAIN), ("prompts",))
    with pytest.raises(DataflowError, match="did you mean 'reward'"):
        flow["rewards"]
