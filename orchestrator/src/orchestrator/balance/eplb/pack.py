"""Which rank each copy goes to: step-aware, so that experts hot in different steps may share a rank."""

from __future__ import annotations

import numpy as np

from orchestrator.balance.eplb.placement import EMPTY


def pack(loads: np.ndarray, counts: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Copies heaviest first, each to the rank with room where the sum over steps of the peak rank grows least.

    A step's peak counts from the mean that every rank reaches in the end: what is below it costs nothing yet.

    Args:
        loads: float32 [steps, experts].
        counts: int64 [experts], copies of each, at most `ranks`, together `ranks * slots`.

    Returns: int32 [ranks, slots], no expert twice on a rank.

    Ties go where the copy meets the least load in its own steps, then to the lowest rank.
    """
    shares = np.ascontiguousarray((loads / counts).T)  # [experts, steps]
    order = np.argsort(-shares.sum(1), kind="stable")
    table = np.full((ranks, slots), EMPTY, np.int32)
    filled = np.zeros(ranks, np.int64)
    received = np.zeros((ranks, loads.shape[0]), np.float32)
    peak = mean = loads.sum(1) / ranks
    for expert in order:
        share = shares[expert]
        closed = filled >= slots
        for _ in range(counts[expert]):
            if closed.all():
                rank = _make_room(table, filled, received, shares, int(expert))
            else:
                growth = np.maximum(received + share - peak, 0.0).sum(1)
                meets = received @ share
                growth += meets * (1e-3 * float(share.sum()) / (float(meets.max()) + 1e-30))
                growth[closed] = np.inf
                rank = int(growth.argmin())
            table[rank, filled[rank]] = expert
            filled[rank] += 1
            received[rank] += share
            peak = np.maximum(received.max(0), mean)
            closed[rank] = True  # no second copy on a rank
    return table


def _make_room(table: np.ndarray, filled: np.ndarray, received: np.ndarray, shares: np.ndarray, expert: int) -> int:
    """Every rank with room has `expert` already: move another copy there from a full rank, and return that rank.

    There is one: the expert has fewer copies than ranks, so a full rank lacks it, and that rank has an expert more
    than the one with room.
    """
    slots = table.shape[1]
    to = int(np.flatnonzero(filled < slots)[0])
    lacking = np.flatnonzero(~(table == expert).any(1))
    source = int(lacking[received[lacking].sum(1).argmin()])
    movable = np.flatnonzero(~np.isin(table[source], table[to]))
    slot = int(movable[shares[table[source, movable]].sum(1).argmin()])
    moved = table[source, slot]
    table[to, filled[to]] = moved
    filled[to] += 1
    received[to] += shares[moved]
    table[source, slot] = table[source, slots - 1]
    table[source, slots - 1] = EMPTY
    filled[source] -= 1
    received[source] -= shares[moved]
    return source
