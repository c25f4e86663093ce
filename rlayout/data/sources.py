"""From a dataset's configuration to its problems."""

from __future__ import annotations

from collections.abc import Sequence

from rlayout.data.files import load_gsm8k, load_local
from rlayout.data.problem import Problem
from rlayout.data.procedural import load_procedural
from rlayout.spec.task import Dataset, Gsm8k, Local, Procedural


def load(config: Dataset) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Training problems and held-out problems, which have no question in common.

    Raises:
        DataError: the dataset cannot be read; the message names the place.
    """
    match config:
        case Procedural():
            return load_procedural(config)
        case Local():
            return load_local(config)
        case Gsm8k():
            return load_gsm8k(config)
