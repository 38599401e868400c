"""One prompt at a prefill worker, and what the worker is set to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kernel_core.check import require
from orchestrator.balance.prefill.cost import PUBLISHED, PrefillCost
from orchestrator.balance.prefill.quota import Quota
from orchestrator.roles.messages import AssignPrefill, Key
from orchestrator.roles.outgoing import Outgoing

State = Literal["fetching", "short", "beginning", "computing", "exporting", "offering"]


@dataclass(frozen=True)
class PrefillOptions:
    """Attributes:
    cost, quota: of steps. work: seconds of work that it takes at once. most: requests that it holds at once, whatever
    they cost, those whose state waits to be fetched too. ranks: that step together.
    """

    cost: PrefillCost = PUBLISHED
    quota: Quota = field(default_factory=Quota)
    work: float = 2.0
    most: int = 256
    ranks: int = 1

    def __post_init__(self) -> None:
        require(self.work > 0, "work", self.work, "above 0")
        for name in ("most", "ranks"):
            require(getattr(self, name) > 0, name, getattr(self, name), "1 or more")


@dataclass
class Job:
    """One prompt. `total` tokens are to be computed or found, `computed` are. `heard`: last word of the target.
    In state short the engine had no memory for it while it held others; it is begun again when that may have changed.

    `since`: when the engine was asked what it has not answered, in states beginning and exporting.
    `ticket`: as in `Began`."""

    order: AssignPrefill
    heard: float
    cost: PrefillCost
    state: State = "fetching"
    rank: int = 0
    computed: int = 0
    since: float = 0.0
    sent: float = 0.0
    tries: int = 0
    embeddings: dict[str, bytes] = field(default_factory=dict)
    outgoing: Outgoing | None = None
    ticket: bytes = b""

    @property
    def key(self) -> Key:
        return self.order.request, self.order.epoch

    @property
    def name(self) -> str:
        return f"{self.order.epoch}/{self.order.request}"

    @property
    def total(self) -> int:
        return len(self.order.spec.prompt) + len(self.order.output)

    @property
    def rest(self) -> float:
        """Seconds of steps that it still asks for, less launches; nothing once it is computed."""
        if self.state in ("exporting", "offering"):
            return 0.0
        computed = self.computed or self.order.spec.hit
        return self.cost.prompt(self.total - computed, computed)
