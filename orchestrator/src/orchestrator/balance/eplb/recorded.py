"""Counts of steps from routing that was recorded row by row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernel_core.check import require


def steps_of(experts: Mapping[int, np.ndarray], num_experts: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Deal recorded rows out into steps of `tokens` rows each, in an order drawn with `seed` or as they are.

    Args:
        experts: integer [rows, top_k] by layer, the same rows in each; padding has been left out.
        seed: below 0 keeps the rows' order, so that a step is a stretch of text.

    Returns: float32 [rows // tokens, layers, num_experts], layers ascending. A last step without enough rows is left
    out.
    """
    require(len(experts) > 0, "experts", "no layer", "one or more")
    rows = {len(ids) for ids in experts.values()}
    require(len(rows) == 1, "experts", f"{sorted(rows)} rows", "the same number in every layer")
    count = rows.pop()
    require(0 < tokens <= count, "tokens", tokens, f"1 to the {count} rows")
    order = np.arange(count) if seed < 0 else np.random.default_rng(seed).permutation(count)
    steps = count // tokens
    result = np.empty((steps, len(experts), num_experts), np.float32)
    for i, layer in enumerate(sorted(experts)):
        ids = experts[layer][order[: steps * tokens]].reshape(steps, -1)
        for step in range(steps):
            result[step, i] = np.bincount(ids[step], minlength=num_experts)
    return result
