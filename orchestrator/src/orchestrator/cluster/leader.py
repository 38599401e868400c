"""What rank 0 does for all: gathers counts, has plans made, and says in each turn what moves and what flips."""

from __future__ import annotations

import numpy as np

from orchestrator.balance.eplb.coordinator import Coordinator
from orchestrator.balance.eplb.messages import Acknowledge, Turn
from orchestrator.balance.eplb.metric import moe_lb
from orchestrator.balance.eplb.planner import Decision
from orchestrator.balance.eplb.settings import EplbSettings
from orchestrator.cluster.plan_process import Planner, PlanRequest


class Leader:
    """Attributes:
    decisions: what planning came to, in order; `lb` the `moe_lb` of each report over the last 128 steps, as received.
    """

    def __init__(self, coordinator: Coordinator, settings: EplbSettings, planner: Planner, domain: int = 0) -> None:
        self.coordinator, self.settings, self.planner, self.domain = coordinator, settings, planner, domain
        self.decisions: list[Decision] = []
        self.lb: list[float] = []

    def turn(self, step: int) -> Turn:
        """What belongs to the start of this step."""
        decision = self.planner.poll()
        if decision is not None:
            self.decisions.append(decision)
            if decision.moves:
                self.coordinator.offer(decision.placement, step)
        return self.coordinator.turn(step)

    def acknowledge(self, messages: list[Acknowledge], step: int) -> None:
        for message in messages:
            self.coordinator.acknowledge(message, step)

    def received(self, counts: np.ndarray) -> None:
        """int64 [ranks, steps, layers], (token, slot) pairs that came to each rank."""
        if counts.size:
            self.lb.append(moe_lb(counts.transpose(1, 2, 0).astype(np.float32)))

    def routed(self, loads: np.ndarray) -> None:
        """float32 [steps, layers, experts], summed over ranks: plan on them, unless a plan is on its way."""
        if not (self.planner.busy or self.coordinator.busy):
            self._plan(loads)

    def repair(self, loads: np.ndarray | None) -> None:
        """Plan at once for experts that no rank holds, on the last known loads, if there are any."""
        placement = self.coordinator.placement
        self._plan(np.zeros((0, placement.layers, placement.num_experts), np.float32) if loads is None else loads)

    def _plan(self, loads: np.ndarray) -> None:
        coordinator = self.coordinator
        request = PlanRequest(loads, coordinator.placement, self.settings, coordinator.alive, self.domain)
        self.planner.start(request)
