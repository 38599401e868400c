"""Between the router, the scaler and those that start machines."""

from __future__ import annotations

from msgspec import Struct

from orchestrator.roles.messages.base import Role, Wire


class RoleLoad(Struct, frozen=True, gc=False):
    """Of one role: live workers that are not draining, and those that are; what is asked of them.

    `use`: part of the capacity that is taken, 0 to 1. `arrived`: missed tokens (prefill) or patches (encoder) since
    the last report; `backlog`: those that wait. `requests` in flight, and `held` tokens of cache, at decode workers.
    """

    role: Role
    workers: tuple[str, ...]
    incarnations: tuple[int, ...]
    draining: tuple[str, ...]
    use: float
    arrived: int
    backlog: int
    requests: int
    held: int


class LoadReport(Wire, frozen=True):
    """Router to scaler at a fixed interval."""

    router_incarnation: int
    number: int
    roles: tuple[RoleLoad, ...]


class WorkerUp(Struct, frozen=True, gc=False):
    """Event of the scaler: a worker that it started runs, or (`failed`) never will."""

    role: Role
    failed: bool = False


class StartWorker(Struct, frozen=True, gc=False):
    """Action of the scaler. `spare` tells to take a warm machine."""

    role: Role
    spare: bool = False


class CancelStart(Struct, frozen=True, gc=False):
    """Action of the scaler: give up a start that has not come up."""

    role: Role


class Exit(Struct, frozen=True, gc=False):
    """Action of a drained worker: end the process."""

    worker: str
