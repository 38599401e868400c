"""How many copies each expert of a layer gets."""

from __future__ import annotations

import numpy as np


def replicate(loads: np.ndarray, slots: int, most: int) -> np.ndarray:
    """One copy each, then one more at a time where it lowers the sum over steps of the heaviest copy most.

    Args:
        loads: float32 [steps, experts], above 0.
        slots: copies to hand out, from `experts` to `experts * most`.
        most: copies an expert can have, one a rank.

    Returns: int64 [experts], summing to `slots`.

    Where no further copy lowers that sum (a step's heaviest copy cannot be divided, or two tie), the heaviest in sum
    gets it.
    """
    experts = loads.shape[1]
    counts = np.ones(experts, np.int64)
    shares = loads.copy()
    sums = loads.sum(0)
    steps = np.arange(len(loads))
    for _ in range(slots - experts):
        first = shares.argmax(1)
        peak = shares[steps, first]
        shares[steps, first] = -1.0
        second = shares.max(1) if experts > 1 else np.zeros_like(peak)
        shares[steps, first] = peak
        divided = loads[steps, first] / (counts[first] + 1)
        # Only the heaviest expert of a step can lower that step.
        gain = np.bincount(first, peak - np.maximum(second, divided), experts)
        gain[counts >= most] = -1.0
        chosen = int(gain.argmax())
        if gain[chosen] <= 0:
            chosen = int(np.where(counts < most, sums / counts, -1.0).argmax())
        counts[chosen] += 1
        shares[:, chosen] = loads[:, chosen] / counts[chosen]
    return counts
