"""Frequencies: uniform numbers, and draws against exact probabilities."""

from __future__ import annotations

import math

import pytest
import torch

import dspark_kernels
import kernel_core
from dspark_kernels import reference
from kernel_core.testing import assert_bitwise


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Standardised statistic: about normal, so 5 is far beyond chance (all seeds are fixed)."""
    expected = probs.double() * counts.sum()
    kept = expected > 5
    statistic = ((counts - expected).square() / expected)[kept].sum().item()
    freedom = int(kept.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


@pytest.mark.parametrize("case", range(reference.DRAWS))
def test_uniform_is_uniform(case):
    u = dspark_kernels.uniform(torch.arange(200_000) // 50, torch.arange(200_000) % 50, case)
    assert bool((u > 0).all()) and bool((u < 1).all())
    counts = torch.bincount((u * 100).long(), minlength=100)
    assert abs(chi_square(counts, torch.full((100,), 0.01))) < 5


def test_uniform_stays_open_at_both_ends():
    """The extreme words give numbers inside (0, 1) after every rounding."""
    assert (0 + 0.5) * 2.0**-52 > 0
    assert (2**52 - 1 + 0.5) * 2.0**-52 < 1


def test_uniform_matches_the_reference_bitwise():
    g = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=g)
    positions = torch.randint(0, 2**40, (1000,), generator=g)
    for case in (0, 1, 7):
        native = dspark_kernels.uniform(seeds, positions, case)
        assert_bitwise(native, reference.uniform(seeds, positions, case))
        assert_bitwise(native, torch.ops.dspark_kernels.uniform(seeds, positions, case))
    with kernel_core.using("reference"):
        assert_bitwise(dspark_kernels.uniform(seeds, positions), reference.uniform(seeds, positions, 0))


def test_uniform_is_fixed():
    """Tokens of a seed must not change with a release."""
    u = dspark_kernels.uniform(torch.tensor([0, 1, -1, 42]), torch.tensor([0, 0, 5, 1 << 20]), 0)
    assert u.tolist() == [0.6524484863740322, 0.3681895156516696, 0.4363872301921309, 0.3156069732151664]


def test_neighbours_are_independent():
    """Consecutive seeds, positions and cases: no correlation."""
    n = 100_000
    base = dspark_kernels.uniform(torch.zeros(n, dtype=torch.int64), torch.arange(n))
    others = (
        dspark_kernels.uniform(torch.ones(n, dtype=torch.int64), torch.arange(n)),
        dspark_kernels.uniform(torch.zeros(n, dtype=torch.int64), torch.arange(1, n + 1)),
        dspark_kernels.uniform(torch.zeros(n, dtype=torch.int64), torch.arange(n), 1),
        dspark_kernels.uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64)),
    )
    for other in others:
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(n)


def test_counters_of_one_seed_never_meet():
    """A bijection of the counter: all draws of a seed differ."""
    u = torch.cat(
        [dspark_kernels.uniform(torch.zeros(5000, dtype=torch.int64), torch.arange(5000), c) for c in range(8)]
    )
    assert len(u.unique()) == len(u)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.5, 1.0, 0), (2.0, 0.8, 0), (1.0, 1.0, 3), (1.3, 0.9, 4)]
)
def test_draws_follow_the_distribution(temperature, top_p, top_k, draw):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -3.0, 0.5])
    probs = reference.distribution(
        logits.unsqueeze(0),
        torch.tensor([temperature]),
        torch.tensor([top_p]),
        torch.tensor([top_k], dtype=torch.int32),
    )[0]
    counts = torch.bincount(draw(logits, 60_000, temperature, top_p, top_k), minlength=7)
    assert bool((counts[probs == 0] == 0).all())
    assert abs(chi_square(counts, probs)) < 5


def test_exact_probabilities_by_enumeration(draw):
    """Every u of a grid: the share of u that gives a token is its probability."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5])
    probs = logits.double().softmax(0)
    seeds = torch.arange(200_000)
    u = dspark_kernels.uniform(seeds, torch.full_like(seeds, 11))
    tokens = draw(logits, len(seeds))
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), probs.cumsum(0)])
    for token in range(4):
        mine = u[tokens == token]
        assert edges[token] - 1e-6 <= mine.min() and mine.max() <= edges[token + 1] + 1e-6


def test_large_vocabulary_frequencies(draw):
    """Blocks and their borders: 3000 tokens in three groups of known mass."""
    logits = torch.zeros(3000)
    logits[1000:2000] = math.log(2)
    logits[2000:] = math.log(5)
    for options in ({}, {"top_p": 1 - 1e-6}, {"top_k": 2999}):
        groups = torch.bincount(draw(logits, 20_000, **options) // 1000, minlength=3)
        assert abs(chi_square(groups, torch.tensor([1, 2, 5]) / 8)) < 5
