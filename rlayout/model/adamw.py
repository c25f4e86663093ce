"""The arithmetic of AdamW on flat float32 vectors.

Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlayout.model import native
from rlayout.spec.optimization import Optimization

BLOCK_ELEMENTS = 1 << 20
"""So many elements are worked on at a time, which bounds the memory of intermediate results."""


def adamw(
    state: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    optimization: Optimization,
    *,
    rate: float,
    clip: float,
    decay: float,
    num_updates: int,
) -> None:
    """One AdamW update in place.

    Args:
        state: master weights, first and second moments, each [n] float32.
        grad: gradient before clipping [n], float32.
        optimization: for betas and eps.
        rate: learning rate of this update.
        clip: factor on the gradient.
        decay: weight decay per unit of learning rate.
        num_updates: updates including this one, for the bias correction.
    """
    beta1, beta2 = optimization.betas
    correction1, correction2 = 1 - beta1**num_updates, 1 - beta2**num_updates
    if native.usable(*state, grad):
        constants = (clip, rate, beta1, beta2, optimization.eps, decay, correction1, correction2)
        native.call("adamw", *state, grad, len(grad), *constants)
        return
    for weight, first, second, raw in zip(*(x.split(BLOCK_ELEMENTS) for x in (*state, grad)), strict=True):
        g = raw * clip
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = (second / correction2).sqrt_().add_(optimization.eps)
        weight.mul_(1 - rate * decay).addcdiv_(first, root, value=-rate / correction1)


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares of a float32 vector, in float64."""
    if native.usable(x):
        total = torch.empty((), dtype=torch.float64)
        native.call("square_sum", x, total, len(x))
        return total
    return torch.stack([block.double().square().sum() for block in x.split(BLOCK_ELEMENTS)]).sum()
