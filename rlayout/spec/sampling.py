"""How tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace

LEAST_TEMPERATURE = 1e-4
"""Below it logits over temperature leave the range in which float32 tells them apart."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one generate call.

    The distribution of a token is softmax(logits / temperature), restricted to the ``top_k`` most
    probable tokens and to the smallest set that holds ``top_p`` of the probability, renormalised.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 means greedy: the most probable token, drawn with log-probability 0."""
    top_k: int = 0
    """0 means no restriction."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the answer and is its last token. Empty: the model's own end tokens."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature != 0 and not self.temperature >= LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether some tokens are cut from the distribution (top-k or top-p is on)."""
        return self.top_k > 0 or self.top_p < 1

    def as_greedy(self) -> Sampling:
        return replace(self, temperature=0.0, top_k=0, top_p=1.0)
