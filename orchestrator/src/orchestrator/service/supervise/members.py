"""The workers of a service as its supervisor sees them: lives, times, and what may be shown of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.service.config import Roles
from orchestrator.service.messages import Hello, ProcessRole
from orchestrator.service.supervise.launch.base import Handle

State = Literal["starting", "up", "draining", "gone", "failed"]

HOUR = 3600.0
_BACKOFF = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_ROUTER = 2.0  # seconds of pause at most: new requests wait for a router, and it starts in a moment
_WELL = 60.0  # seconds up after which earlier failures do not slow the next start down


@dataclass
class Member:
    """One worker, whose processes follow one another under one name.

    Attributes:
        life: of the process that runs or is about to start. handle: None before it starts.
        due: when the next life starts, None while there is a process or none is wanted.
        begun: when this life started. heard: when its last word came. since: when `state` began.
        told: when it was told to leave, or None. asked: when that was said last.
        killed: when this life was ended by us, and `why`.
        fails: lives in a row that did not last. ends: times of ends within the last hour.
        ever: whether any of its lives came up.
    """

    name: str
    role: ProcessRole
    due: float | None
    since: float
    life: int = 0
    state: State = "starting"
    handle: Handle | None = None
    hello: Hello | None = None
    address: str = ""
    begun: float = 0.0
    heard: float = 0.0
    came_up: float | None = None
    told: float | None = None
    asked: float = 0.0
    killed: float | None = None
    why: str = ""
    fails: int = 0
    ends: deque[float] = field(default_factory=deque)
    restarts: int = 0
    ever: bool = False
    last_exit: str = ""
    last_words: str = ""

    def become(self, state: State, now: float) -> None:
        if state != self.state:
            self.state, self.since = state, now

    def pause(self, now: float) -> float:
        """Seconds before the next life, after an end now."""
        if self.came_up is not None and now - self.came_up >= _WELL:
            self.fails = 0
        pause = _BACKOFF[min(self.fails, len(_BACKOFF) - 1)]
        self.fails += 1
        return min(pause, _ROUTER) if self.role == "router" else pause

    def ended_within_hour(self, now: float) -> int:
        while self.ends and now - self.ends[0] > HOUR:
            self.ends.popleft()
        return len(self.ends)

    def show(self, now: float) -> dict[str, Any]:
        hello, handle = self.hello, self.handle
        return {
            "name": self.name,
            "role": self.role,
            "life": self.life,
            "state": self.state,
            "pid": handle.pid if handle is not None else 0,
            "node": handle.node if handle is not None else "",
            "address": self.address,
            "steps": hello.steps if hello is not None else 0,
            "waiting": round(hello.waiting, 3) if hello is not None else 0.0,
            "held": hello.held if hello is not None and self.state != "gone" else 0,
            "memory": hello.memory if hello is not None else 0,
            "restarts": self.restarts,
            "last_exit": self.last_exit,
            "since": round(now - self.since, 3),
            "numbers": dict(hello.numbers) if hello is not None else {},
        }


@dataclass
class Recovery:
    """Between the end of one life and the first word of the next; unix times. `up` is 0 until then."""

    name: str
    role: ProcessRole
    life: int
    noticed: float
    why: str
    up: float = 0.0


def names_of(roles: Roles) -> list[tuple[str, ProcessRole]]:
    """Of all workers that a service begins with, the router first."""
    counts: Sequence[tuple[ProcessRole, int]] = (
        ("encoder", roles.encoder),
        ("prefill", roles.prefill),
        ("decode", roles.decode),
    )
    return [("router", "router"), *((f"{role}-{i}", role) for role, count in counts for i in range(count))]
