"""A layer's table with what it makes the ranks receive, kept up to date move by move."""

from __future__ import annotations

import numpy as np


class LayerState:
    """Of one layer while it is being improved.

    Attributes:
        table: int32 [ranks, slots], -1 for an empty slot.
        loads: float32 [steps, experts].
        counts: int64 [experts], copies of each.
        shares: float32 [experts + 1, steps], what a copy receives; the last row is an empty slot's.
        received: float32 [ranks, steps].
        has: bool [ranks, experts + 1]; the last column is False.
    """

    def __init__(self, table: np.ndarray, loads: np.ndarray) -> None:
        experts = loads.shape[1]
        self.table, self.loads = table.copy(), loads
        self.counts = np.bincount(table[table >= 0], minlength=experts)
        self.shares = np.zeros((experts + 1, len(loads)), np.float32)
        self.shares[:-1] = (loads / np.maximum(self.counts, 1)).T
        self.received = self.shares[self.table].sum(1)
        self.has = np.zeros((len(table), experts + 1), np.bool_)
        self.has[np.arange(len(table))[:, None], self.table] = True
        self.has[:, experts] = False

    def exchange(self, rank: int, slot: int, other: int, there: int) -> None:
        """Exchange two slots' experts."""
        a, b = int(self.table[rank, slot]), int(self.table[other, there])
        self.table[rank, slot], self.table[other, there] = b, a
        for at, gone, come in ((rank, a, b), (other, b, a)):
            if gone >= 0:
                self.has[at, gone] = False
            if come >= 0:
                self.has[at, come] = True
            self.received[at] = self.shares[self.table[at]].sum(0)

    def replace(self, rank: int, slot: int, expert: int) -> None:
        """Make a slot a copy of another expert."""
        old = int(self.table[rank, slot])
        self.table[rank, slot] = expert
        for changed, by in ((old, -1), (expert, 1)):
            if changed >= 0:
                self.counts[changed] += by
                self.shares[changed] = self.loads[:, changed] / self.counts[changed]
                self.has[rank, changed] = by > 0
        self.received = self.shares[self.table].sum(1)

    def peaks(self) -> float:
        """The objective: the sum over steps of what the peak rank receives."""
        return float(self.received.max(0).sum())

    def peaks_if_replaced(self, rank: int, slot: int, expert: int) -> float:
        """The objective after `replace`; the rank lacks `expert`, and the old one has another copy, if there is one."""
        old = int(self.table[rank, slot])
        received = self.received.copy()
        share = self.loads[:, expert] / (self.counts[expert] + 1)
        received[self.has[:, expert]] += share - self.shares[expert]
        if old >= 0:
            rest = self.loads[:, old] / (self.counts[old] - 1)
            received[self.has[:, old]] += rest - self.shares[old]
            received[rank] -= rest
        received[rank] += share
        return float(received.max(0).sum())
