"""The same plan with the least to move: ranks and slots are interchangeable until weights lie in them."""

from __future__ import annotations

import numpy as np


def relabel(table: np.ndarray, current: np.ndarray, num_experts: int) -> np.ndarray:
    """Give each row of a plan to the rank that holds most of it, and keep what stays in its slot.

    Args:
        table: int32 [ranks, slots], a layer's plan for these ranks.
        current: int32 [ranks, slots], what they hold.

    Returns: int32 [ranks, slots]; the rows of `table` in another order, each in another order.

    Pairs are taken greedily by what they share (ties: lowest row, lowest rank), which is near the optimum at a
    hundredth of an assignment's code and time.
    """
    ranks = len(table)
    shared = _members(table, num_experts) @ _members(current, num_experts).T
    result = np.empty_like(table)
    for _ in range(ranks):
        row, rank = np.unravel_index(int(shared.argmax()), shared.shape)
        shared[row, :] = shared[:, rank] = -1.0
        result[rank] = _keep_slots(table[row], current[rank])
    return result


def _members(table: np.ndarray, num_experts: int) -> np.ndarray:
    member = np.zeros((len(table), num_experts + 1), np.float32)
    member[np.arange(len(table))[:, None], table] = 1.0  # an empty slot marks the last column
    return member[:, :-1]


def _keep_slots(row: np.ndarray, held: np.ndarray) -> np.ndarray:
    stays = np.isin(held, row) & (held >= 0)
    result = np.where(stays, held, np.int32(-1))
    result[~stays] = row[~np.isin(row, held[stays])]
    return result
