"""How a trained role is updated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Optimization:
    """AdamW with decoupled weight decay, global-norm clipping and a learning-rate schedule."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only, not to norms and biases."""
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}")
        if self.warmup_steps < 0 or not self.weight_decay >= 0 or not self.eps > 0:
            raise ValueError("warmup_steps and weight_decay must not be negative, eps must be positive")

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step ``step`` (from 0) out of ``total_steps``."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        left = max(0.0, 1.0 - done)
        if self.schedule == "linear":
            return self.learning_rate * left
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (1 - left)))
