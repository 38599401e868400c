"""What rank 0 does for all: gathers counts, has plans made, and says in each turn what moves and what flips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orchestrator.balance.eplb.coordinator import Coordinator
from orchestrator.balance.eplb.domains import Domain
from orchestrator.balance.eplb.messages import Acknowledge, Turn
from orchestrator.balance.eplb.metric import moe_lb
from orchestrator.balance.eplb.planner import Decision
from orchestrator.balance.eplb.settings import EplbSettings
from orchestrator.balance.eplb.swaps import MoveLimits
from orchestrator.cluster.counts import KINDS
from orchestrator.cluster.plan_process import Planner, PlanRequest


class Leader:
    """Attributes:
    decisions: what planning came to, in order.
    lb: the `moe_lb` of each report over the last 128 steps, as received. lb_of: the same by kind of step: "prefill"
        steps had rows of a prompt on some rank, "decode" steps had none; the last report of each.
    """

    def __init__(self, coordinator: Coordinator, settings: EplbSettings, planner: Planner, domain: Domain = 0) -> None:
        self.coordinator, self.settings, self.planner, self.domain = coordinator, settings, planner, domain
        self.decisions: list[Decision] = []
        self.lb: list[float] = []
        self.lb_of: dict[str, float] = {}
        self._repair: Decision | None = None
        self._after_repair: np.ndarray | None = None

    def turn(self, step: int) -> Turn:
        """What belongs to the start of this step."""
        decision, self._repair = self._repair, None
        if decision is None and self._after_repair is not None and not (self.planner.busy or self.coordinator.busy):
            loads, self._after_repair = self._after_repair, None
            self.planner.start(self._request(loads, replace(self.settings, incremental=True)))
        if decision is None:
            decision = self.planner.poll()
        if decision is not None:
            self.decisions.append(decision)
            if decision.moves:
                self.coordinator.offer(decision.placement, step)
        return self.coordinator.turn(step)

    def acknowledge(self, messages: list[Acknowledge], step: int) -> None:
        for message in messages:
            self.coordinator.acknowledge(message, step)

    def received(self, counts: np.ndarray, kinds: np.ndarray | None = None) -> None:
        """int64 [ranks, steps, layers], (token, slot) pairs that came to each rank; `StepCount.kinds` of the steps."""
        if not counts.size:
            return
        by_step = counts.transpose(1, 2, 0).astype(np.float32)
        self.lb.append(moe_lb(by_step))
        if kinds is None:
            return
        prompts = kinds & 1 << KINDS.index("prefill") != 0
        for name, steps in (("prefill", prompts), ("decode", ~prompts & (kinds != 0))):
            if steps.any():
                self.lb_of[name] = moe_lb(by_step[steps])

    def routed(self, loads: np.ndarray) -> None:
        """float32 [steps, layers, experts], summed over ranks: plan on them, unless a plan is on its way."""
        if not (self.planner.busy or self.coordinator.busy):
            self.planner.start(self._request(loads, self.settings))

    def repair(self, loads: np.ndarray | None) -> None:
        """Plan at once for experts that no rank holds, on the last known loads, if there are any.

        First only what lets steps run again moves. That is planned here: it takes milliseconds a layer, no step can run
        before, and a process would take longer to start. Then, on known loads, a few exchanges: a full plan would have
        all ranks busy with moves when requests have just waited.
        """
        placement = self.coordinator.placement
        nothing = np.zeros((0, placement.layers, placement.num_experts), np.float32)
        self._after_repair = loads
        only = replace(self.settings, incremental=True, limits=MoveLimits(swaps=0))
        self._repair = self._request(nothing if loads is None else loads, only).run()

    def _request(self, loads: np.ndarray, settings: EplbSettings) -> PlanRequest:
        coordinator = self.coordinator
        return PlanRequest(loads, coordinator.placement, settings, coordinator.alive, self.domain)
