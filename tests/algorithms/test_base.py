import pickle
from dataclasses import dataclass

import pytest

from rlayout.algorithms import ALGORITHMS, Algorithm, Grpo, Sft
from rlayout.errors import ConfigError, DataflowError
from rlayout.spec.dataflow import Call, Dataflow, Kind
from rlayout.spec.sampling import Sampling
from rlayout.spec.serialization import from_plain, to_plain

TRAIN = Call("train", Kind.TRAIN, role="actor", inputs=("tokens",))
FLOW = Dataflow((TRAIN,), source=("tokens",))
LOSS = Sft().build(Sampling()).losses["train"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_named_as_in_the_table_and_pickles(name: str):
    config = ALGORITHMS[name]()
    assert config.name == name
    algorithm = config.build(Sampling())
    assert pickle.loads(pickle.dumps(algorithm)).losses == algorithm.losses


@dataclass(frozen=True)
class Recipe:
    algorithm: Grpo | Sft


def test_configuration_is_read_and_written():
    config = Grpo(clip_high=0.28, aggregation="sequence_mean")
    assert from_plain(Recipe, to_plain(Recipe(config))) == Recipe(config)
    with pytest.raises(ConfigError, match=r"algorithm: samples_per_prompt must be at least 2"):
        from_plain(Recipe, {"algorithm": {"name": "grpo", "samples_per_prompt": 1}})
    with pytest.raises(ConfigError, match=r"algorithm.name: 'gpro' .*did you mean 'grpo'"):
        from_plain(Recipe, {"algorithm": {"name": "gpro"}})


def test_what_a_dataflow_needs_is_there():
    with pytest.raises(DataflowError, match="losses: train call 'train' is missing"):
        Algorithm(FLOW, losses={}, role_sources={"actor": "model"})
    with pytest.raises(DataflowError, match="role_sources: role 'actor' is missing"):
        Algorithm(FLOW, losses={"train": LOSS}, role_sources={})
    with pytest.raises(DataflowError, match="losses: the dataflow has no train call 'learn'"):
        Algorithm(FLOW, losses={"train": LOSS, "learn": LOSS}, role_sources={"actor": "model"})
    flow = Dataflow((TRAIN, Call("mean", Kind.COMPUTE, inputs=("tokens",))), source=("tokens",))
    with pytest.raises(DataflowError, match="computes: compute call 'mean' is missing"):
        Algorithm(flow, losses={"train": LOSS}, role_sources={"actor": "model"})
