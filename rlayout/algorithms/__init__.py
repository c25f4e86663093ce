"""The algorithms, by the name that a configuration file gives them."""

from __future__ import annotations

from collections.abc import Mapping

from rlayout.algorithms.base import Algorithm, AlgorithmConfig
from rlayout.algorithms.grpo import Grpo
from rlayout.algorithms.sft import Sft

ALGORITHMS: Mapping[str, type[Grpo] | type[Sft]] = {"grpo": Grpo, "sft": Sft}

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmConfig", "Grpo", "Sft"]
