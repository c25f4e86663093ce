"""The errors a user may meet. A message says what was wrong, where, and the nearest right choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RlayoutError(Exception):
    """Base of every error that rlayout raises on purpose."""


class ConfigError(RlayoutError):
    """A configuration file, an override or a combination of settings is wrong."""


class PlanError(RlayoutError):
    """An execution plan does not fit the dataflow, the model or the cluster."""


class DataflowError(RlayoutError):
    """The calls of an algorithm do not form a dataflow."""


class DataError(RlayoutError):
    """A dataset, a prompt template or a batch is wrong."""


class ModelError(RlayoutError):
    """A model folder or file cannot be read as a model that rlayout computes exactly."""


class TrainingError(RlayoutError):
    """An update of the weights cannot be computed, for instance because the gradient is not finite."""


class RewardError(RlayoutError):
    """A verifier or reward function failed or returned something that is not a reward."""


class CheckpointError(RlayoutError):
    """A checkpoint could not be written or read."""


class WorkerError(RlayoutError):
    """A worker failed, died or did not answer in time."""


class WeightVersionError(RlayoutError):
    """A call was about to use other weights than those that the plan names."""


MOST_LISTED = 12


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint that names the valid choice nearest to ``name``, then all (of many, the nearest)."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    lead = f"did you mean {close[0]!r}? " if close else ""
    if len(known) <= MOST_LISTED:
        return f"{lead}Valid: {', '.join(known) or 'none'}"
    shown = difflib.get_close_matches(name, known, n=MOST_LISTED, cutoff=0.0)
    return f"{lead}Valid: {', '.join(shown)} and {len(known) - len(shown)} more"
