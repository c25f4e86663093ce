"""The shape of a decoder-only transformer: everything that its numbers depend on, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "qwen2", "qwen3", "mistral"]


@dataclass(frozen=True)
class RopeScaling:
    """A variant of rotary position embedding for longer contexts (names as in Hugging Face)."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one model. Counts are of heads, layers and tokens; no bytes."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention output projection has a bias (Llama's attention_bias)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    """A token attends to this many last tokens, itself included; None: to all."""
    sliding_layers: tuple[int, ...] = ()
    """The layers that the window applies to."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if (self.sliding_window is None) != (not self.sliding_layers):
            raise ValueError(
                f"sliding_window {self.sliding_window} and sliding_layers {self.sliding_layers}: "
                "give both or none"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.sliding_layers):
            raise ValueError(f"sliding_layers {self.sliding_layers}: there are {self.num_layers} layers")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}")

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """The sliding window of ``layer``, or None where it attends to every earlier token."""
        return self.sliding_window if layer in self.sliding_layers else None
