"""What a supervisor and its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.cluster.links import Links
from orchestrator.engine.request import Event, SamplingParams


@dataclass(frozen=True)
class Form:
    """To a worker: leave the epoch before, whatever state it is in, and be a rank of this one.

    `members` are workers' numbers; a worker's place among them is its rank.
    """

    epoch: int
    members: tuple[int, ...]
    links: Links


@dataclass(frozen=True)
class Submit:
    """To a worker: continue a prompt; `generated` tokens of it were given out already."""

    epoch: int
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    generated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Abort:
    """To a worker: end a request."""

    request_id: str


@dataclass(frozen=True)
class Leave:
    """To all workers: end when all others would, too."""


@dataclass(frozen=True)
class Up:
    """From a worker: the model is loaded."""

    pid: int


@dataclass(frozen=True)
class Serving:
    """From a rank: every expert has a copy and steps run; what it took."""

    epoch: int
    seconds: float
    from_peers: int
    from_checkpoint: int


@dataclass(frozen=True)
class Told:
    """From a rank: events in order. `index` is the number of each token in its request's output, -1 for others."""

    epoch: int
    events: tuple[tuple[int, Event], ...]


@dataclass(frozen=True)
class Refused:
    """From a rank: a request that it will not run, and why."""

    epoch: int
    request_id: str
    reason: str


@dataclass(frozen=True)
class Broke:
    """From a rank: its epoch ended in an error of communication; `waiting_for` are ranks that did not come."""

    epoch: int
    reason: str
    waiting_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failed:
    """From a worker: it cannot go on at all."""

    reason: str


@dataclass(frozen=True)
class Left:
    """From a worker, last: what it did. `moe_lb` and `plans` are those of rank 0."""

    steps: int
    collectives: int
    moe_lb: tuple[float, ...] = ()
    plans: dict[str, int] = field(default_factory=dict)
    bytes_moved: dict[str, int] = field(default_factory=dict)
    digests: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
