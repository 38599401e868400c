"""Settings of an expert-parallel engine of one host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kernel_core.check import require
from orchestrator.balance.eplb.placement import smallest_slots
from orchestrator.balance.eplb.settings import DECODE, PREFILL, EplbSettings
from orchestrator.cluster.counts import Statistics
from orchestrator.engine.config import EngineConfig
from orchestrator.model.config import ModelConfig
from orchestrator.model.expert_parallel.drafts import draft_slots
from orchestrator.model.expert_parallel.layer import Combine

NO_PLANS = EplbSettings(redundant=1, window=128, interval=0)
PLANS: dict[str, tuple[EplbSettings, Statistics]] = {
    "off": (NO_PLANS, "all"),
    "prefill": (PREFILL, "prefill"),
    "decode": (DECODE, "decode"),
    "all": (DECODE, "all"),
}
"""By name: when experts are planned anew, and on whose rows."""


@dataclass(frozen=True)
class EpOptions:
    """Attributes:
    ranks: workers at the start.
    slots: experts that a rank holds in a layer; None takes what `ranks` need and `eplb.redundant` more.
    spares: buffers of one expert beside those, for moves; None takes as many as slots. With fewer than slots, plans
        move so many experts of a rank and layer at most; what a death took may need more, which ends the engine.
    eplb: when experts are planned anew; by default never.
    statistics: whose rows plans are made from: "all", or "prefill" or "decode" where the engine is there for these.
        `PLANS` has the settings that belong to each.
    domain: ranks in a row that share fast links; between them few experts move (`eplb.limits`). 0 where all do.
    bytes_per_step: most that a rank receives, and most that it sends, between two steps.
    patience: agreements without progress after which a plan is dropped.
    timeout: seconds that a rank waits for another before it takes the group for broken.
    combine: "slots" for the bits of one rank, "ranks" for less to send.
    spread_drafts: experts of the draft stages are spread over the ranks too; else every rank has all of them.
    engine: of each rank.
    threads: of each rank's kernels.
    """

    ranks: int
    slots: int | None = None
    spares: int | None = None
    eplb: EplbSettings = NO_PLANS
    statistics: Statistics = "all"
    domain: int = 0
    bytes_per_step: int = 64 << 20
    patience: int = 1000
    timeout: float = 30.0
    combine: Combine = "slots"
    spread_drafts: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)
    threads: int = 1

    def resolved(self, model: ModelConfig) -> EpOptions:
        """The same with slots and spares filled in. ValueError for what cannot hold the model's experts."""
        require(self.ranks > 0, "ranks", self.ranks, "1 or more")
        require(self.timeout > 0, "timeout", self.timeout, "above 0 seconds")
        require(self.threads > 0, "threads", self.threads, "1 or more")
        require(self.bytes_per_step > 0, "bytes_per_step", self.bytes_per_step, "1 or more")
        require(self.patience > 0, "patience", self.patience, "1 or more")
        require(self.domain >= 0, "domain", self.domain, "0 or more")
        known = ("all", "prefill", "decode")
        require(self.statistics in known, "statistics", repr(self.statistics), " or ".join(map(repr, known)))
        if self.engine.device == "cuda":
            found = torch.cuda.device_count()
            require(self.ranks <= found, "ranks", self.ranks, f"at most the {found} NVIDIA GPUs of this host")
        experts = model.n_routed_experts
        least = smallest_slots(experts, self.ranks)
        slots = min(experts, least + self.eplb.redundant) if self.slots is None else self.slots
        require(slots >= least, "slots", slots, f"{least} or more: {self.ranks} ranks hold {experts} experts")
        if self.spread_drafts and model.num_nextn_predict_layers:
            most = draft_slots(model, slots)
            require(most <= slots, "spread_drafts", True, f"False: a rank has {slots} slots for {most} draft experts")
        spares = slots if self.spares is None else self.spares
        require(spares > 0, "spares", spares, "1 or more")
        eplb = self.eplb
        if spares < slots:
            limits = replace(eplb.limits, per_rank=min(spares, eplb.limits.per_rank))
            eplb = replace(eplb, incremental=True, limits=limits)
        # On GPUs draft stages draft from graphs of their own, with all their experts on each.
        spread = self.spread_drafts and self.engine.device == "cpu"
        return replace(self, slots=slots, spares=spares, eplb=eplb, spread_drafts=spread)
