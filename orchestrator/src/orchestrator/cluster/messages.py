"""What a supervisor and its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.cluster.links import Links
from orchestrator.engine.request import Event, SamplingParams


@dataclass(frozen=True)
class Form:
    """To a worker: leave the epoch before, whatever state it is in, and be a rank of this one.

    `members` are workers' numbers; a worker's place among them is its rank. It goes on with the requests that it has.
    """

    epoch: int
    members: tuple[int, ...]
    links: Links


@dataclass(frozen=True)
class Submit:
    """To a worker: continue a prompt; `generated` tokens of it were given out already, by a worker that is gone."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    generated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Abort:
    """To a worker: end a request."""

    request_id: str


@dataclass(frozen=True)
class Do:
    """To a worker behind a role: a command of `roles.engine_port`, carried out between two steps.

    `group` counts groups of the role; a higher one ends all that was asked before.
    """

    group: int
    command: Any


@dataclass(frozen=True)
class Did:
    """From a worker behind a role: answers to commands of this group.

    `steps` that it has run so far; `requests` and cache `blocks` that its engine holds now.
    """

    group: int
    answers: tuple[Any, ...]
    steps: int
    requests: int
    blocks: int


@dataclass(frozen=True)
class Leave:
    """To all workers: end when all others would, too."""


@dataclass(frozen=True)
class Up:
    """From a worker: the model is loaded, without experts; `read` bytes of the checkpoint's tensors.

    `layout`: tag of the states that it makes and takes, where it stands behind a role.
    """

    pid: int
    read: int
    layout: str = ""


@dataclass(frozen=True)
class Serving:
    """From a rank: every expert has a copy and steps run; what it took."""

    epoch: int
    seconds: float
    from_peers: int
    from_checkpoint: int


@dataclass(frozen=True)
class Told:
    """From a worker: events in order. `index` is the number of each token in its request's output, -1 for others."""

    events: tuple[tuple[int, Event], ...]


@dataclass(frozen=True)
class Refused:
    """From a worker: a request that it will not run, and why."""

    request_id: str
    reason: str


@dataclass(frozen=True)
class Balance:
    """How evenly experts are loaded in this epoch, and what became of plans; from rank 0, whenever any of it changes.

    `moe_lb` is the last report over 128 steps, 0 before the first, `moe_lb_of` the same for prefill and decode steps;
    `plans` are `Coordinator.counts`: started, committed, dropped and why.
    """

    epoch: int
    moe_lb: float = 0.0
    moe_lb_of: dict[str, float] = field(default_factory=dict)
    plans: dict[str, int] = field(default_factory=dict)


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
    """From a worker, last: what it did. `moe_lb`, `moe_lb_of` and `plans` are those of rank 0.

    `steps`, `collectives` and `counted` (steps by kind) of the last epoch; `prompt_tokens` that it computed in all.
    """

    steps: int
    collectives: int
    prompt_tokens: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    moe_lb: tuple[float, ...] = ()
    moe_lb_of: dict[str, float] = field(default_factory=dict)
    plans: dict[str, int] = field(default_factory=dict)
    bytes_moved: dict[str, int] = field(default_factory=dict)
    digests: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
