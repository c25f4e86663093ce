"""From sums and maxima on a device to logged statistics, in one transfer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlayout.data.objective import Statistic


def gather_statistics(
    means: Mapping[str, tuple[Tensor, Tensor]], maxima: Mapping[str, Tensor]
) -> dict[str, Statistic]:
    """Turn scalar tensors into statistics, waiting for the device once.

    Args:
        means: name -> (sum over this micro-batch, weight of this micro-batch), scalars.
        maxima: name -> largest value in this micro-batch, a scalar.
    """
    scalars = [scalar for pair in means.values() for scalar in pair] + list(maxima.values())
    if not scalars:
        return {}
    values = iter(torch.stack([s.detach().to(torch.float64) for s in scalars]).tolist())
    found = {name: Statistic(next(values), next(values)) for name in means}
    found.update({name: Statistic(next(values), kind="max") for name in maxima})
    return found
