"""Copies for experts that a failure took the last copy of, in place of copies that others can spare."""

from __future__ import annotations

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.placement import EMPTY


def repair(table: np.ndarray, loads: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """A layer's table in which every expert has a copy again; nothing else moves.

    Args:
        table: int32 [ranks, slots], empty on ranks that are not alive.
        loads: float32 [steps, experts].
        alive: bool [ranks].

    Returns: int32 [ranks, slots].

    Heaviest expert first; each takes the slot, empty or of an expert with another copy, whose rank then has the lowest
    peak: the sum over steps of that rank's tokens above the mean.
    """
    table = table.copy()
    experts = loads.shape[1]
    counts = np.bincount(table[table >= 0], minlength=experts)
    sums = loads.sum(0)
    missing = np.flatnonzero(counts == 0)
    spare = int(alive.sum()) * table.shape[1] - int((counts > 0).sum())
    require(len(missing) <= spare, "alive", f"{int(alive.sum())} ranks", f"slots for all {experts} experts")
    mean = loads.sum(1) / alive.sum()
    for expert in missing[np.argsort(-sums[missing], kind="stable")]:
        shares = np.zeros((experts + 1, len(loads)), np.float32)
        shares[:-1] = (loads / np.maximum(counts, 1)).T
        received = shares[table].sum(1)
        ranks, slots = np.nonzero(alive[:, None] & ((table == EMPTY) | (np.append(counts, 0)[table] > 1)))
        after = received[ranks] - shares[table[ranks, slots]] + shares[expert]
        # The other copies of what makes room take its tokens over, so a light and much copied one goes first.
        burden = shares[table[ranks, slots]].sum(1) / np.maximum(np.append(counts, 2)[table[ranks, slots]] - 1, 1)
        cost = np.maximum(after - mean, 0.0).sum(1) + burden
        at = int(cost.argmin())
        old = table[ranks[at], slots[at]]
        if old != EMPTY:
            counts[old] -= 1
        table[ranks[at], slots[at]] = expert
        counts[expert] = 1
    return table
