"""What each step of one rank routed and received, by layer."""

from __future__ import annotations

import numpy as np

from orchestrator.balance.eplb.metric import STEPS
from orchestrator.balance.eplb.window import LoadWindow


class StepCounts:
    """Told by the layers (`ParallelExperts`), closed once a step.

    Attributes:
        window: routed tokens by step, layer and logical expert, padding excluded.
        steps: how many steps have ended.
    """

    def __init__(self, layers: int, num_experts: int, top_k: int, window: int) -> None:
        self.window = LoadWindow(layers, num_experts, window)
        self.steps, self._top_k = 0, top_k
        self._rows = np.zeros(layers, np.int64)
        self._here = np.zeros(layers, np.int64)
        self._received = np.zeros((STEPS, layers), np.int64)

    def routed(self, layer: int, ids: np.ndarray, valid: np.ndarray) -> None:
        self._rows[layer] = valid.sum()
        self.window.note(layer, ids, valid)

    def received(self, layer: int, rows: int) -> None:
        self._here[layer] = rows

    def end_step(self) -> None:
        """Close a step. Each layer's counts have to sum to its rows x top_k, else ValueError."""
        self.window.end_step(self.steps, self._rows, self._top_k)
        self._received[self.steps % STEPS] = self._here
        self._rows[:], self._here[:] = 0, 0
        self.steps += 1

    def last_received(self) -> np.ndarray:
        """int64 [steps, layers], (token, slot) pairs of the last 128 steps, oldest first."""
        held = min(self.steps, STEPS)
        return self._received[(self.steps - held + np.arange(held)) % STEPS]
