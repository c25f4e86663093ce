"""Sampling answers from a model: KV cache, continuous batching, order-independent randomness."""

from rlayout.model.generation.engine import Generator

__all__ = ["Generator"]
