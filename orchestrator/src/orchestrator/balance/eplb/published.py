"""The rule that deepseek-ai/EPLB publishes, for comparison: sums of a window, one node and one group of experts.

Replicas go one at a time to the expert with the most load a copy; copies are packed heaviest first onto the least
loaded rank that has a free slot. Two copies of an expert may meet on one rank.
"""

from __future__ import annotations

import numpy as np

from orchestrator.balance.eplb.placement import EMPTY, Placement, check_capacity


def plan_by_sums(loads: np.ndarray, ranks: int, slots: int) -> Placement:
    """Placement by the sums of `loads` [steps, layers, experts] over its steps."""
    layers, experts = loads.shape[1:]
    check_capacity(experts, ranks, slots)
    table = np.full((layers, ranks, slots), EMPTY, np.int32)
    for layer, load in enumerate(loads.sum(0, dtype=np.float64)):
        counts = np.ones(experts, np.int64)
        for _ in range(ranks * slots - experts):
            counts[(load / counts).argmax()] += 1
        copies = np.repeat(np.arange(experts), counts)
        shares = (load / counts)[copies]
        filled, received = np.zeros(ranks, np.int64), np.zeros(ranks)
        for i in np.argsort(-shares, kind="stable"):
            rank = np.where(filled < slots, received, np.inf).argmin()
            table[layer, rank, filled[rank]] = copies[i]
            filled[rank] += 1
            received[rank] += shares[i]
    return Placement(table, experts)
