"""Policies and limits of a router, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_core.check import require
from orchestrator.balance.admission import Limits, Weights
from orchestrator.balance.paths import PathSettings
from orchestrator.balance.prefill.bins import BinSettings, Key
from orchestrator.balance.prefill.cost import PUBLISHED, PrefillCost


@dataclass(frozen=True)
class RouterPolicy:
    """Attributes:
    limits: of the door. weights: of tenants' accounts.
    cost: of prefill steps. bins, key: of prefill bins. paths: of reads.
    patches: that an encoder has in work at most; an idle one takes any image.
    drafts: of speculation, for the room of a decode worker.
    round: seconds between sizings of the bins. load: seconds between reports to the scaler, 0 for none.
    """

    limits: Limits = field(default_factory=lambda: Limits(context=1 << 20, pool=1 << 20))
    weights: Weights = field(default_factory=Weights)
    cost: PrefillCost = PUBLISHED
    bins: BinSettings = field(default_factory=BinSettings)
    key: Key = "length"
    paths: PathSettings = field(default_factory=lambda: PathSettings(busy=400_000, slow=4_000_000))
    patches: int = 16_384
    drafts: int = 5
    round: float = 2.0
    load: float = 5.0

    def __post_init__(self) -> None:
        require(self.patches > 0, "patches", self.patches, "1 or more")
        require(self.drafts >= 0, "drafts", self.drafts, "0 or more")
        require(self.round > 0, "round", self.round, "above 0")
        require(self.load >= 0, "load", self.load, "0 or more")
