"""From a configuration to everything that a run needs to know before a process starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlayout.algorithms import Algorithm
from rlayout.config import Config, beside
from rlayout.errors import ConfigError, PlanError
from rlayout.model import processor
from rlayout.model.huggingface import check_weights, end_token_ids, read_shape
from rlayout.planning.heuristics import colocated
from rlayout.spec.cluster import Cluster, Dtype
from rlayout.spec.model_shape import ModelShape
from rlayout.spec.plan import ExecutionPlan
from rlayout.spec.sampling import Sampling


@dataclass(frozen=True)
class Setup:
    """A checked configuration and what was derived from it."""

    config: Config
    shape: ModelShape
    sampling: Sampling
    """With the stop tokens filled in."""
    algorithm: Algorithm
    cluster: Cluster
    plan: ExecutionPlan
    dtype: Dtype
    """Of computation."""
    cache_bytes: int
    """Memory of the generation cache on each device."""
    warnings: tuple[str, ...]

    def derived(self) -> dict[str, Any]:
        """What was derived, as plain data for people; the plan apart."""
        config = self.config
        rows = config.prompts_per_step * getattr(config.algorithm, "samples_per_prompt", 1)
        return {
            "rows_per_step": rows,
            "rows_per_update": rows // config.algorithm.updates_per_step,
            "optimizer_steps": config.steps * config.algorithm.updates_per_step,
            "dtype": self.dtype,
            "stop_token_ids": list(self.sampling.stop_token_ids),
            "cache_gib_per_worker": round(self.cache_bytes / 2**30, 2),
        }


def prepare(config: Config) -> Setup:
    """Derive and check; starts nothing and loads no weights.

    Raises:
        RlayoutError: something does not fit; the message names it.
    """
    cluster = Cluster(config.cluster.nodes, config.cluster.workers, config.cluster.device)
    dataflow = config.algorithm.build(config.sampling).dataflow
    dtype = compute_dtype(config)
    if config.plan is None:
        plan = colocated(dataflow, cluster, micro_batch_tokens=micro_batch_tokens(config, dtype))
    else:
        plan = read_plan(Path(config.plan))
    plan.check(dataflow, cluster)
    for name, placement in plan.placements.items():
        if placement.layout.dp != placement.layout.num_devices:
            raise PlanError(
                f"plan: calls.{name}.layout: {placement.layout} splits the model, but runs can only replicate "
                f"it so far: d{placement.layout.num_devices}"
            )
    # What needs the model, and so seconds, comes last.
    shape = read_shape(config.model.source)
    sampling = _with_stop_tokens(config)
    if sampling.max_new_tokens >= shape.max_positions:
        raise ConfigError(
            f"sampling.max_new_tokens: {sampling.max_new_tokens} leaves no room for a prompt in the model's "
            f"context of {shape.max_positions} tokens"
        )
    for token in sampling.stop_token_ids:
        if not 0 <= token < shape.vocab_size:
            raise ConfigError(
                f"sampling.stop_token_ids: {token} is no token of the model, whose ids go from 0 to "
                f"{shape.vocab_size - 1}"
            )
    check_weights(config.model.source)
    return Setup(
        config=config,
        shape=shape,
        sampling=sampling,
        algorithm=config.algorithm.build(sampling),
        cluster=cluster,
        plan=plan,
        dtype=dtype,
        cache_bytes=_cache_bytes(config),
        warnings=tuple(_warnings(config)),
    )


def read_plan(path: Path) -> ExecutionPlan:
    """Read an execution plan file.

    Raises:
        PlanError: it is missing or is not a plan.
    """
    if not path.is_file():
        raise PlanError(f"no plan file {path} (seen from {Path.cwd()}){beside(path)}")
    try:
        return ExecutionPlan.from_plain(yaml.safe_load(path.read_text()))
    except (yaml.YAMLError, UnicodeDecodeError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error


def micro_batch_tokens(config: Config, dtype: Dtype) -> int:
    """Tokens that a device computes at once: enough to keep its matrix products busy, few enough that
    activations stay small beside the weights (of 135M parameters 0.5 MB per token in bfloat16, 1 MB in
    float32). Replaced by the planner's memory model when there is one.
    """
    if config.cluster.device == "cuda":
        return 16_384
    return 512 if dtype == "bfloat16" else 256


def compute_dtype(config: Config) -> Dtype:
    """The dtype of computation: as configured, or what the device computes fastest."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if config.cluster.device == "cuda" or processor.multiplies_bfloat16() else "float32"


def _with_stop_tokens(config: Config) -> Sampling:
    if config.sampling.stop_token_ids:
        return config.sampling
    stop = end_token_ids(config.model.source)
    if not stop:
        raise ConfigError(
            f"sampling.stop_token_ids: the model {config.model.source} names no end token, so no answer would "
            "ever end; give the id of the token that ends an answer"
        )
    return replace(config.sampling, stop_token_ids=tuple(stop))


def _cache_bytes(config: Config) -> int:
    """A quarter of the memory that is free now, shared by the workers of this machine; at most 4 GiB on CPU."""
    share = psutil.virtual_memory().available // 4 // config.cluster.workers
    return min(share, 4 * 2**30)


def _warnings(config: Config) -> Iterator[str]:
    if config.cluster.device != "cpu" or config.cluster.address is not None:
        return
    cores = os.cpu_count() or 1
    if config.cluster.workers > cores:
        yield (
            f"cluster.workers: {config.cluster.workers} workers share {cores} cores; "
            f"{cores} would be as fast and need less memory"
        )
    if config.model.dtype == "bfloat16" and not processor.multiplies_bfloat16():
        yield (
            "model.dtype: this processor only emulates bfloat16, several times slower than float32; "
            "'auto' takes float32 here"
        )
