"""Drain, and migration of requests with their state."""

from __future__ import annotations

from orchestrator.roles.messages.base import RequestSpec, Role, Wire


class Drain(Wire, frozen=True):
    """Scaler to worker, repeated until `Gone`: take nothing new; after `grace` seconds hand over what is left."""

    worker: str
    incarnation: int
    grace: float


class Gone(Wire, frozen=True):
    """Worker to scaler and router: it holds nothing and leaves."""

    worker: str
    role: Role
    incarnation: int


class MoveWanted(Wire, frozen=True):
    """Draining decode worker to router, repeated until `MoveTo`: find a place for this request.

    `number` counts its attempts; a higher one wants another place.
    """

    request: str
    epoch: int
    worker: str
    incarnation: int
    entry: str
    spec: RequestSpec
    output: tuple[int, ...]
    number: int


class MoveTo(Wire, frozen=True):
    """Router to draining decode worker. `target` is empty where none has room: ask again."""

    request: str
    epoch: int
    number: int
    target: str
    target_incarnation: int


class Landed(Wire, frozen=True):
    """Target of a migration to entry, repeated until `Resume` or `Release`: a copy with this output stands ready."""

    request: str
    epoch: int
    worker: str
    incarnation: int
    output: tuple[int, ...]


class Resume(Wire, frozen=True):
    """Entry to the target of a migration: go on as `new_epoch`; it has all output before `upto`."""

    request: str
    epoch: int
    new_epoch: int
    incarnation: int
    upto: int
