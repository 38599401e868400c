"""Settings of an expert-parallel engine of one host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kernel_core.check import require
from orchestrator.balance.eplb.placement import smallest_slots
from orchestrator.balance.eplb.settings import EplbSettings
from orchestrator.engine.config import EngineConfig
from orchestrator.model.config import ModelConfig
from orchestrator.model.expert_parallel.layer import Combine

NO_PLANS = EplbSettings(redundant=1, window=128, interval=0)


@dataclass(frozen=True)
class EpOptions:
    """Attributes:
    ranks: workers at the start.
    slots: experts that a rank holds in a layer; None takes what `ranks` need and `eplb.redundant` more.
    spares: buffers of one expert beside those, for moves; None takes as many as slots.
    eplb: when experts are planned anew; by default never.
    bytes_per_step: most that a rank receives, and most that it sends, between two steps.
    patience: agreements without progress after which a plan is dropped.
    timeout: seconds that a rank waits for another before it takes the group for broken.
    combine: "slots" for the bits of one rank, "ranks" for less to send.
    engine: of each rank.
    threads: of each rank's kernels.
    """

    ranks: int
    slots: int | None = None
    spares: int | None = None
    eplb: EplbSettings = NO_PLANS
    bytes_per_step: int = 64 << 20
    patience: int = 1000
    timeout: float = 30.0
    combine: Combine = "slots"
    engine: EngineConfig = field(default_factory=EngineConfig)
    threads: int = 1

    def resolved(self, model: ModelConfig) -> EpOptions:
        """The same with slots and spares filled in. ValueError for what cannot hold the model's experts."""
        require(self.ranks > 0, "ranks", self.ranks, "1 or more")
        require(self.timeout > 0, "timeout", self.timeout, "above 0 seconds")
        require(self.threads > 0, "threads", self.threads, "1 or more")
        require(self.bytes_per_step > 0, "bytes_per_step", self.bytes_per_step, "1 or more")
        require(not self.engine.overlap, "engine.overlap", True, "off: steps of several ranks do not overlap yet")
        require(self.engine.device == "cpu", "engine.device", repr(self.engine.device), "'cpu'")
        experts = model.n_routed_experts
        least = smallest_slots(experts, self.ranks)
        slots = min(experts, least + self.eplb.redundant) if self.slots is None else self.slots
        require(slots >= least, "slots", slots, f"{least} or more: {self.ranks} ranks hold {experts} experts")
        spares = slots if self.spares is None else self.spares
        require(spares > 0, "spares", spares, "1 or more")
        return replace(self, slots=slots, spares=spares)
