"""How many drafts a step verifies: the total that makes the most tokens a second (docs/speculation.md).

Expected tokens of a step are one a request and, for each admitted draft, its chance to stand, a. With the drafts in
descending order of a, the total K is the argmax of (R + sum of the first K) / seconds(R + K). The search does not stop
at the first K that gains nothing, since a step's cost has stairs. That is without bias because the a it sees are those
of an earlier step: what it decides cannot depend on the drafts that it decides about. Which drafts the K are is decided
later, by current confidences (`dspark_kernels.schedule`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from orchestrator.balance.cost_curve import Correction, CostCurve

_RECENT, _FEW = 9, 5  # steps whose sampling time counts, and how many of them it takes


@dataclass
class Budget:
    """Chooses K. Without a curve every draft is verified.

    `others` are the last times of what a step does beside its forward pass, with its number of requests. `pays` tells
    whether the last total was expected to make more tokens a second than decoding without drafts.
    """

    curve: CostCurve | None = None
    correction: Correction | None = None
    others: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=200))
    pays: bool = True

    def __post_init__(self) -> None:
        if self.curve is not None and self.correction is None:
            self.correction = Correction(self.curve)

    def total(self, requests: int, confidences: Sequence[Sequence[float]], most: int | None = None) -> int:
        """Drafts to admit, over all requests.

        Args:
            requests: requests in the step, each of which has its own row.
            confidences: of the budgeted requests, two steps old; 1.0 where a draft has none yet.
            most: no more than this; None takes all.

        Of equal totals the smallest wins.
        """
        chances = sorted((a for row in confidences for a in survivals(row)), reverse=True)
        limit = len(chances) if most is None else min(most, len(chances))
        if self.curve is None:
            return limit
        other = self.other_seconds(requests)
        fixed = self.curve.draft(requests) + other
        tokens, best, chosen = float(requests), -1.0, 0
        for count in range(limit + 1):
            rate = tokens / (self.seconds(requests + count) + fixed)
            if rate > best:
                best, chosen = rate, count
            if count < limit:
                tokens += chances[count]
        self.pays = best >= requests / (self.seconds(requests) + other)
        return chosen

    def seconds(self, rows: int) -> float:
        """Forward pass of a step of so many rows, corrected for what the last steps took."""
        assert self.curve is not None and self.correction is not None
        return self.curve.step(rows) + self.correction.slope * rows

    def note(self, requests: int, rows: int, forward: float, other: float) -> None:
        """Learn from a step: seconds of its forward pass, and of the rest of it."""
        if self.correction is not None:
            self.correction.note(rows, forward)
            self.others.append((requests, max(0.0, other - (self.curve.draft(requests) if self.curve else 0.0))))

    def other_seconds(self, requests: int) -> float:
        """Median of the last steps with as many requests; else of the last steps at all; 0 while there are too few."""
        for mine in ([t for r, t in self.others if r == requests], [t for _, t in self.others]):
            if len(mine) >= _FEW:
                return median(mine[-_RECENT:])
        return 0.0


@dataclass
class Rest:
    """Stops drafting for a while where it does not pay, and tries again: requests and texts change.

    After `patience` losing steps in a row no drafts are made for `length` steps.
    """

    patience: int = 8
    length: int = 64
    _losing: int = 0
    _left: int = 0

    def drafts(self, pays: bool) -> bool:
        """Whether to draft at the end of this step, whose drafts were expected to pay or not."""
        if self._left > 0:
            self._left -= 1
            return self._left == 0
        self._losing = 0 if pays else self._losing + 1
        if self._losing < self.patience:
            return True
        self._losing, self._left = 0, self.length
        return False


def survivals(confidence: Sequence[float]) -> list[float]:
    """Chance that each draft stands with all before it. NaN and negative ones count 0."""
    chance, found = 1.0, []
    for c in confidence:
        chance *= min(c, 1.0) if c > 0 else 0.0
        found.append(chance)
    return found
