"""From a logical expert to the copy that computes a token: what dispatch reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_core.check import require
from orchestrator.balance.eplb.placement import EMPTY, Placement


@dataclass(frozen=True)
class RoutingTable:
    """Copies of each expert in one layer.

    Attributes:
        copies: int32 [experts, most], physical slots (rank x slots + slot) in ascending order, `EMPTY` behind them.
        counts: int32 [experts], how many there are.
        slots: slots a rank.
    """

    copies: np.ndarray
    counts: np.ndarray
    slots: int

    def choose(self, ids: np.ndarray, rank: int, token: np.ndarray) -> np.ndarray:
        """Physical slots for the routing of `rank`'s tokens: its own copy first, else by rank and token index.

        Args:
            ids: integer [tokens, top_k], logical experts; negative ones (padding) stay `EMPTY`.
            token: integer [tokens], index of each token in its rank's step.

        Returns: int32 [tokens, top_k].

        A pure function: copies hold the same bytes, and which one is taken depends on nothing that is drawn or timed.
        With tokens spread evenly over ranks all copies of an expert receive the same.

        Raises:
            ValueError: an id is too high or its expert has no copy.
        """
        require(ids.ndim == 2 and len(ids) == len(token), "ids", list(ids.shape), f"[{len(token)}, top_k]")
        padding = ids < 0
        safe = np.where(padding, 0, ids)
        require(ids.size == 0 or int(safe.max()) < len(self.counts), "ids", "too high", f"below {len(self.counts)}")
        count = self.counts[safe]
        require(bool((padding | (count > 0)).all()), "ids", "an expert without a copy", "experts that are placed")
        turn = (rank + token[:, None]) % np.maximum(count, 1)
        chosen = np.take_along_axis(self.copies[safe], turn[..., None], -1)[..., 0]
        own = self.copies[safe]
        here = (own != EMPTY) & (own // self.slots == rank)
        local = np.where(here, own, EMPTY).max(-1)
        return np.where(padding, EMPTY, np.where(local != EMPTY, local, chosen)).astype(np.int32)


def routing_table(table: np.ndarray, num_experts: int) -> RoutingTable:
    """The routing of one layer's int32 [ranks, slots]."""
    slots = table.shape[1]
    flat = table.ravel()
    held = np.flatnonzero(flat != EMPTY)
    order = held[np.argsort(flat[held], kind="stable")]  # by expert, then by physical slot
    counts = np.bincount(flat[held], minlength=num_experts)
    within = np.arange(len(order)) - (np.cumsum(counts) - counts)[flat[order]]
    copies = np.full((num_experts, max(1, int(counts.max()))), EMPTY, np.int32)
    copies[flat[order], within] = order
    return RoutingTable(copies, counts.astype(np.int32), slots)


def routing_tables(placement: Placement) -> list[RoutingTable]:
    """The routing of every layer."""
    return [routing_table(table, placement.num_experts) for table in placement.experts]
