"""What an entry knows of a request, before and after its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from orchestrator.roles.messages import RequestSpec

State = Literal["submitted", "accepted", "streaming", "waiting"]


@dataclass
class Owned:
    """One request that has not ended.

    Attributes:
        log: tokens that were delivered. worker, incarnation: that the present epoch is bound to, if any.
        moved_from: the epoch before a migration. accepted_by: router that accepted this epoch.
        began: when it came; progress: when it came or its last token did. sent: last word to the router.
        heard, acked: last word from and acknowledgement to the worker. fails: attempts since the last new token.
        doubted: the router has called it lost, though its worker was heard.
    """

    request: str
    spec: RequestSpec
    began: float
    epoch: int = 1
    state: State = "submitted"
    log: list[int] = field(default_factory=list)
    ready: bool = False
    worker: str = ""
    incarnation: int = 0
    moved_from: int = 0
    accepted_by: int = 0
    was_accepted: bool = False
    progress: float = 0.0
    sent: float = 0.0
    heard: float = 0.0
    acked: float = 0.0
    fails: int = 0
    doubted: bool = False
    retry_at: float = 0.0


@dataclass
class Ended:
    """A request after its outcome: `told` when the router has answered, or is not to be told. `at`: the entry's age."""

    epoch: int
    output: int
    at: float
    sent: float
    told: bool
    silent: bool = False
