"""Learns an engine's constants from the steps that it runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np

from kernel_core.check import require
from orchestrator.balance.prefill.cost import Chunk, PrefillCost


class CostFit:
    """Non-negative least squares on relative errors, with exponential forgetting.

    The first `warm_up` steps are not taken: first launches compile and allocate. A step that takes more than `stall`
    times what the present constants say is a stall of the host and is not learned from, unless as many as `believe`
    come one after the other: then the engine has changed.

    Attributes:
        cost: the present constants. samples: steps learned from. rejected: stalls.
    """

    def __init__(
        self,
        start: PrefillCost,
        *,
        warm_up: int = 8,
        forget: float = 0.998,
        stall: float = 3.0,
        believe: int = 8,
        least: int = 16,
    ) -> None:
        require(0 < forget <= 1, "forget", forget, "above 0, to 1")
        require(stall > 1, "stall", stall, "above 1")
        self.cost, self.samples, self.rejected = start, 0, 0
        self._skip, self._forget, self._stall, self._believe, self._least = warm_up, forget, stall, believe, least
        self._gram, self._moment = np.zeros((5, 5)), np.zeros(5)
        self._errors: deque[float] = deque(maxlen=200)
        self._odd = 0

    @property
    def mape(self) -> float:
        """Mean |predicted - taken| / taken of recent steps, each predicted before it was learned from; NaN without."""
        return float(np.mean(self._errors)) if self._errors else math.nan

    def note(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step of these chunks took `seconds`. Steps without chunks teach nothing."""
        if not chunks or not (math.isfinite(seconds) and seconds > 0):
            return
        if self._skip > 0:
            self._skip -= 1
            return
        predicted = self.cost.step(chunks)
        if self.samples >= self._least:
            if seconds > self._stall * predicted:
                self._odd += 1
                if self._odd < self._believe:
                    self.rejected += 1
                    return
                self._gram[:], self._moment[:] = 0, 0
                self.samples = 0
            self._odd = 0
            self._errors.append(abs(predicted - seconds) / seconds)
        row = np.array(_features(chunks)) / seconds
        self._gram = self._forget * self._gram + np.outer(row, row)
        self._moment = self._forget * self._moment + row
        self.samples += 1
        if self.samples >= self._least:
            self.cost = self._solve()

    def _solve(self) -> PrefillCost:
        scale = np.sqrt(np.maximum(np.diag(self._gram), 1e-300))  # columns differ by 10^9
        gram = self._gram / np.outer(scale, scale) + 1e-12 * np.eye(5)
        return PrefillCost(*(float(v) for v in _non_negative(gram, self._moment / scale) / scale))


def _non_negative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises x' gram x - 2 moment' x: the best over all supports, 31 for five constants."""
    best, least = np.zeros(len(moment)), 0.0
    everything = range(len(moment))
    for support in chain.from_iterable(combinations(everything, n) for n in range(1, len(moment) + 1)):
        at = list(support)
        x = np.linalg.solve(gram[np.ix_(at, at)], moment[at])
        value = -float(moment[at] @ x)  # of the objective, where its gradient is 0
        if (x >= 0).all() and value < least:
            best, least = np.zeros(len(moment)), value
            best[at] = x
    return best


def _features(chunks: Sequence[Chunk]) -> tuple[float, ...]:
    return (
        1.0,
        float(sum(c.tokens for c in chunks)),
        float(sum(c.computed for c in chunks)),
        float(sum(c.tokens * (c.computed + c.tokens / 2) for c in chunks)),
        float(sum(c.final for c in chunks)),
    )
