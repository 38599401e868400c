"""Sums over samples that belong together, and how far a figure may lie off by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    stderr: float

    def within(self, other: float, errors: float = 2.0) -> bool:
        """Whether `other` is no more than so many standard errors away."""
        return abs(self.value - other) <= errors * self.stderr


def ratio_of_sums(numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0) -> Estimate:
    """Sum over sum, with its error by bootstrap over the samples (pairs that are drawn together).

    So paired differences count: with the same windows in numerator and denominator, what makes a window hard cancels.

    Raises:
        ValueError: no samples, unequal lengths, or a denominator that is not positive.
    """
    top, bottom = np.asarray(numerator, float), np.asarray(denominator, float)
    if len(top) == 0 or top.shape != bottom.shape:
        raise ValueError(f"numerator: got {len(top)} samples, allowed are as many as denominator has ({len(bottom)})")
    if not bottom.sum() > 0:
        raise ValueError(f"denominator: got a sum of {bottom.sum()}, allowed is more than 0")
    picks = np.random.default_rng(seed).integers(0, len(top), (RESAMPLES, len(top)))
    sums = bottom[picks].sum(1)
    kept = sums > 0
    ratios = top[picks].sum(1)[kept] / sums[kept]
    return Estimate(float(top.sum() / bottom.sum()), float(ratios.std(ddof=1)) if kept.sum() > 1 else float("nan"))
