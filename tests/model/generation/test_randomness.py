"""Numbers by name: the same for every batch, different for every name, uniform."""

from __future__ import annotations

import pytest
import torch

from rlayout.model.generation.randomness import uniforms

MASK = 2**64 - 1


def mixed(x: int) -> int:
    """SplitMix64's output function in exact integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform_of(seed: int, step: int, sequence: int, position: int, index: int) -> float:
    state = mixed(mixed(seed & MASK) + step)
    state = mixed(mixed(state + sequence) + position)
    return (mixed(state + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (1, 0), (-7, 3), (2**63 + 5, 10**6)])
def test_agrees_with_exact_integers(seed, step):
    sequences, positions = [0, 5, 10**12], [0, 77, 8191]
    numbers = uniforms(seed, step, torch.tensor(sequences), torch.tensor(positions), 4)
    for b, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        for i in range(4):
            assert numbers[b, i].item() == uniform_of(seed, step, sequence, position, i)


def test_splitmix64_reference_value():
    # First output of the published generator seeded with 0 (Vigna's splitmix64.c).
    assert mixed(0) == 0xE220A8397B1DCDAF


def test_no_two_names_share_a_number():
    names = torch.cartesian_prod(torch.arange(40), torch.arange(40))
    numbers = [
        uniforms(seed, step, names[:, 0], names[:, 1], 3).flatten() for seed in (0, 1) for step in (0, 1)
    ]
    assert torch.cat(numbers).unique().numel() == 4 * 1600 * 3


@pytest.mark.parametrize("along", ["sequences", "positions", "indices"])
def test_uniform_and_uncorrelated_along_each_name(along):
    count, here = 200_000, torch.arange(200_000)
    zero = torch.zeros_like(here)
    if along == "indices":
        numbers = uniforms(3, 1, zero[:1], zero[:1], count)[0]
    else:
        sequences, positions = (here, zero) if along == "sequences" else (zero, here)
        numbers = uniforms(3, 1, sequences, positions, 1)[:, 0]
    assert numbers.min() >= 0
    assert numbers.max() < 1
    observed = torch.histc(numbers, 100, 0, 1)
    chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum()
    assert chi_square < 160  # 99 degrees of freedom: exceeded with probability 1e-4
    centered = numbers - 0.5
    correlation = (centered[1:] * centered[:-1]).mean() * 12
    assert abs(correlation) < 4 / count**0.5
