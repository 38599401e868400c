"""How unevenly tokens fall on ranks: `moe_lb`, a ratio of sums with the maximum taken in each step.

A maximum over the sums of a window would hide experts that are hot in different steps; a mean of ratios would count an
almost empty step as much as a full one.
"""

from __future__ import annotations

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.placement import EMPTY, Placement

STEPS = 128  # steps that `moe_lb` is reported over


def rank_loads(placement: Placement, loads: np.ndarray) -> np.ndarray:
    """Tokens that each rank receives where the copies of an expert share its tokens evenly.

    Args:
        loads: [steps, layers, experts], tokens by logical expert.

    Returns: float32 [steps, layers, ranks].
    """
    require(
        loads.ndim == 3 and loads.shape[1:] == (placement.layers, placement.num_experts),
        "loads",
        list(loads.shape),
        f"[steps, {placement.layers}, {placement.num_experts}]",
    )
    shares = np.zeros((len(loads), placement.layers, placement.num_experts + 1), np.float32)
    shares[:, :, :-1] = loads / np.maximum(placement.copies(), 1)  # the last column is what an empty slot receives
    slots = np.where(placement.experts == EMPTY, placement.num_experts, placement.experts)
    found = np.empty((len(loads), placement.layers, placement.ranks), np.float32)
    for layer in range(placement.layers):
        found[:, layer] = shares[:, layer][:, slots[layer]].sum(-1)
    return found


def moe_lb(received: np.ndarray, alive: np.ndarray | None = None) -> float:
    """Sum over steps and layers of the peak rank's tokens over the sum of the mean rank's: 1 is perfect.

    Args:
        received: [steps, layers, ranks], tokens that each rank receives.
        alive: bool [ranks], ranks that count; None for all.

    Returns 1.0 where nothing was received.
    """
    require(
        received.ndim == 3 and received.size > 0, "received", list(received.shape), "[steps, layers, ranks], not empty"
    )
    kept = received if alive is None else received[:, :, alive]
    require(kept.shape[2] > 0, "alive", "no rank", "at least one")
    mean = float(kept.mean(-1, dtype=np.float64).sum())
    return float(kept.max(-1).sum(dtype=np.float64)) / mean if mean > 0 else 1.0


def moe_lb_by_layer(received: np.ndarray, alive: np.ndarray | None = None) -> np.ndarray:
    """`moe_lb` of each layer alone, float64 [layers]."""
    return np.array([moe_lb(received[:, i : i + 1], alive) for i in range(received.shape[1])])
