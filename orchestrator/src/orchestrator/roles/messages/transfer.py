"""Transfer of a state: the source offers, the target pulls parts. Prefill to decode, and decode to decode."""

from __future__ import annotations

from orchestrator.roles.messages.base import Wire
from orchestrator.roles.state_parts import Manifest


class SourceAlive(Wire, frozen=True):
    """Source to target while it computes or waits: renews the lease of the reservation.

    `ticket`: where the engine's parts can be fetched meanwhile, see `engine_port.Began`; empty where it has none yet.
    """

    request: str
    epoch: int
    source: str
    source_incarnation: int
    ticket: bytes = b""


class TargetAlive(Wire, frozen=True):
    """Target to source: answer, renews the lease of what the source holds. `ready`: the reservation stands."""

    request: str
    epoch: int
    target: str
    target_incarnation: int
    ready: bool


class SourceGone(Wire, frozen=True):
    """Router to target: the source is dead; what it has not sent will not come."""

    request: str
    epoch: int
    source: str
    source_incarnation: int


class Offer(Wire, frozen=True):
    """Source to target, repeated until parts are wanted."""

    request: str
    epoch: int
    source: str
    source_incarnation: int
    target_incarnation: int
    manifest: Manifest


class Want(Wire, frozen=True):
    """Target to source: send these parts (again)."""

    request: str
    epoch: int
    target: str
    target_incarnation: int
    source_incarnation: int
    parts: tuple[int, ...]


class Piece(Wire, frozen=True):
    request: str
    epoch: int
    source_incarnation: int
    part: int
    payload: bytes


class Taken(Wire, frozen=True):
    """Target to source: the state is in the target's cache (`good`), or will never be. The source frees it."""

    request: str
    epoch: int
    target: str
    target_incarnation: int
    good: bool
    why: str = ""
