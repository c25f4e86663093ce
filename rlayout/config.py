"""The configuration of a run: typed, strict, read from YAML with ``key=value`` overrides.

Few knobs: what can be derived from these (micro-batches, cache sizes, stop tokens, the plan) is derived
by ``rlayout.setup`` and shown by ``rlayout show``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlayout.algorithms import Grpo, Sft
from rlayout.errors import ConfigError, nearest
from rlayout.spec.cluster import DeviceKind
from rlayout.spec.optimization import Optimization
from rlayout.spec.sampling import Sampling
from rlayout.spec.serialization import from_plain, to_plain
from rlayout.spec.task import Dataset, PromptTemplate, Reward


@dataclass(frozen=True)
class ModelConfig:
    """The model to start from."""

    source: str
    """A Hugging Face folder, a ``.gguf`` file, or ``package:NAME`` for one inside an installed package."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of computation; the optimizer always keeps float32 weights. ``auto``: bfloat16, but float32 on a
    processor that only emulates bfloat16, several times slower."""


@dataclass(frozen=True)
class Warmup:
    """Supervised steps on the dataset's worked solutions, before the algorithm."""

    steps: int
    rows_per_step: int = 32
    optimizer: Optimization = field(default_factory=lambda: Optimization(learning_rate=2e-5))

    def __post_init__(self) -> None:
        _at_least_one(steps=self.steps, rows_per_step=self.rows_per_step)


@dataclass(frozen=True)
class Evaluation:
    """Greedy accuracy on held-out problems, before the algorithm, after it and in between."""

    problems: int | None = None
    """How many held-out problems; null: 128, or all if there are fewer; 0 turns evaluation off."""
    every_steps: int = 0
    """0: only before and after."""

    def __post_init__(self) -> None:
        if (self.problems or 0) < 0 or self.every_steps < 0:
            raise ValueError("problems and every_steps must not be negative")


@dataclass(frozen=True)
class Checkpoints:
    """When weights are written."""

    every_steps: int = 0
    """0: only at the end."""
    keep: int = 2
    """How many of the newest stay."""

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(f"every_steps must not be negative, got {self.every_steps}")
        _at_least_one(keep=self.keep)


@dataclass(frozen=True)
class ClusterConfig:
    """Where the workers run."""

    workers: int = 2
    """Workers on each node: one per device."""
    nodes: int = 1
    device: DeviceKind = "cpu"
    address: str | None = None
    """Of a running Ray cluster to join; null starts one on this machine."""
    call_timeout_seconds: float = 3600.0
    """A call that takes longer ends the run with an error that names who did not answer."""

    def __post_init__(self) -> None:
        _at_least_one(workers=self.workers, nodes=self.nodes)
        if not self.call_timeout_seconds > 0:
            raise ValueError(f"call_timeout_seconds must be positive, got {self.call_timeout_seconds}")
        if self.nodes > 1 and self.address is None:
            raise ValueError(
                f"{self.nodes} nodes need 'address' of a running Ray cluster (ray start --head on one machine, "
                "ray start --address on the others); without it there is one node, this machine"
            )


@dataclass(frozen=True)
class Config:
    """One run."""

    model: ModelConfig
    dataset: Dataset
    algorithm: Grpo | Sft
    steps: int
    prompts_per_step: int
    prompt: PromptTemplate = field(default_factory=PromptTemplate)
    reward: Reward | None = None
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: Optimization = field(default_factory=Optimization)
    warmup: Warmup | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: str | None = None
    """Path of an execution plan; null places every call on all devices."""
    seed: int = 0
    output: str = "runs"
    """Folder in which the run's own folder is made."""

    def __post_init__(self) -> None:
        _at_least_one(steps=self.steps, prompts_per_step=self.prompts_per_step)
        if isinstance(self.algorithm, Grpo) and self.reward is None:
            raise ValueError("algorithm grpo learns from rewards: add a 'reward' section, e.g. name: exact")
        rows = self.prompts_per_step * getattr(self.algorithm, "samples_per_prompt", 1)
        updates = self.algorithm.updates_per_step
        if rows % updates:
            fitting = [n for n in range(1, rows + 1) if rows % n == 0]
            best = min(fitting, key=lambda n: (abs(n - updates), n))
            raise ValueError(
                f"algorithm.updates_per_step: {rows} rows per step (prompts_per_step x samples_per_prompt) "
                f"cannot be divided into {updates} updates of equal size; the nearest that fits is {best}"
            )


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and apply ``key=value`` overrides (``optimizer.learning_rate=1e-5``).

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; the message names the place.
    """
    return from_plain(Config, _read(path, overrides))


PATHS = ("model.source", "dataset.train", "dataset.test", "dataset.folder", "reward.function", "plan")
"""Settings that may name a file or folder."""


def save_config(config: Config, path: Path) -> None:
    """Write a configuration so that ``load_config`` returns it again, from whichever folder it is called.

    Relative paths that exist are written as absolute ones.
    """
    plain = to_plain(config)
    for key in PATHS:
        section, _, name = key.rpartition(".")
        holder = plain[section] if section else plain
        if holder and holder.get(name):
            holder[name] = _absolute(holder[name])
    path.write_text(yaml.safe_dump(plain, sort_keys=False))


def _absolute(text: str) -> str:
    """A path, or ``path.py:function``, made absolute if the file exists; any other text as it is."""
    place, extension, function = text.partition(".py:")
    file = Path(f"{place}.py" if extension else place)
    return f"{file.absolute()}{extension[3:]}{function}" if file.exists() else text


def _read(path: Path, overrides: Sequence[str]) -> Any:
    if path.is_dir():
        raise ConfigError(
            f"{path} is neither a configuration file nor the folder of a run (it has no config.yaml)"
        )
    if not path.is_file():
        raise ConfigError(f"no configuration file or run {path}{beside(path)}")
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{path}: expected a mapping of settings")
        merged = OmegaConf.merge(loaded, *map(_override, overrides))
        return OmegaConf.to_container(merged)  # text like ${x} stays as it is
    except TypeError as error:  # OmegaConf's own word for a list in the place of a mapping
        raise ConfigError(
            f"{path}: an override gives a list where settings are, or settings for a list"
        ) from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _override(text: str) -> DictConfig:
    if "=" not in text or text.startswith("="):
        raise ConfigError(f"override {text!r}: expected key=value, e.g. optimizer.learning_rate=1e-5")
    try:
        return OmegaConf.from_dotlist([text])
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"override {text!r}: the value is not YAML: {error}") from error


def beside(path: Path) -> str:
    """A hint that names the YAML file or run nearest to a missing one."""
    files = (*path.parent.glob("*.yaml"), *(p.parent for p in path.parent.glob("*/config.yaml")))
    return f". {nearest(path.name, {file.name for file in files})}" if files else ""


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
