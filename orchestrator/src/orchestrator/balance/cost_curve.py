"""What a decode step costs by the number of rows it computes, and what the last steps say about it.

The curve is profiled once, at one context length; later steps read more cache rows. `Correction` compares them with the
curve and adds what they take more, as a slope over the rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from kernel_core.check import require

_KEPT, _LEAST = 5000, 10  # steps remembered; samples of a size that make it count


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a verification step of so many rows.

    Attributes:
        rows: numbers of rows that were measured, ascending.
        seconds: what a step of each takes.
        staircase: a step of fewer rows takes as long as the next measured size (graphs of fixed sizes); else costs
            between two sizes are interpolated. Beyond the largest size the last slope goes on.
        draft_seconds: measured times of a draft block, by `draft_requests`.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    staircase: bool = False
    draft_requests: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, at, values in (
            ("rows", self.rows, self.seconds),
            ("draft_requests", self.draft_requests, self.draft_seconds),
        ):
            same = len(at) == len(values) and all(a < b for a, b in pairwise(at))
            require(same, name, list(at), f"ascending, one for each of {len(values)} times")
            require(all(v > 0 for v in values), name, list(values), "times above 0")
        require(len(self.rows) > 0, "rows", "none", "at least one")

    def step(self, rows: int) -> float:
        """Seconds of the forward pass of `rows` rows."""
        return _read(self.rows, self.seconds, rows, self.staircase)

    def draft(self, requests: int) -> float:
        """Seconds of drafting for `requests` requests; 0 where that was not measured."""
        return _read(self.draft_requests, self.draft_seconds, requests, False) if self.draft_requests else 0.0


def _read(at: Sequence[int], values: Sequence[float], x: int, staircase: bool) -> float:
    i = bisect_left(at, x)
    if i < len(at) and (staircase or at[i] == x):
        return values[i]
    if i == 0:
        return values[0]
    low = min(i, len(at) - 1) - 1
    if low < 0:  # one size only: proportional beyond it
        return values[0] * max(1.0, x / at[0])
    slope = (values[low + 1] - values[low]) / (at[low + 1] - at[low])
    return values[low] + max(slope, 0.0) * (x - at[low])


@dataclass
class Correction:
    """Seconds a row that steps take beyond the curve, from the last 5,000 of them."""

    curve: CostCurve
    _samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _slope: float = 0.0
    _new: int = 0

    def note(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        size = rows
        if self.curve.staircase:
            i = bisect_left(self.curve.rows, rows)
            size = self.curve.rows[i] if i < len(self.curve.rows) else rows
        self._samples.append((size, (seconds - self.curve.step(rows)) / size))
        self._new += 1
        if self._new >= _LEAST:
            self._new, self._slope = 0, self._fit()

    @property
    def slope(self) -> float:
        return self._slope

    def _fit(self) -> float:
        by_size: dict[int, list[float]] = {}
        for size, excess in self._samples:
            by_size.setdefault(size, []).append(excess)
        medians = [median(values) for values in by_size.values() if len(values) >= _LEAST]
        return max(0.0, median(medians)) if medians else self._slope
