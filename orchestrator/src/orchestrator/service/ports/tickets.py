"""What names a state that can be fetched: where its sender listens, and which handoff it is."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

HANDOFF_BYTES = 32
_NAME = 255  # characters
_LARGEST = 4096
"""Bytes of a ticket; it has strings, so a bound is checked before it is read."""


class Ticket(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Attributes:
    node: of the sender; `shared` is good there alone. shared: address of shared memory. host, port: of TCP, or
    Mooncake's. other: name of an in-process link. Empty, or 0: it does not listen there.
    handoff: 32 random bytes, those of all its parts. epoch: of the request. form: as in `engine.handoff`.
    """

    node: str
    shared: str
    host: str
    port: int
    other: str
    handoff: bytes
    epoch: int
    form: Literal["full", "replay", "tokens"]

    def __post_init__(self) -> None:
        longest = max(len(text) for text in (self.node, self.shared, self.host, self.other))
        if longest > _NAME or len(self.handoff) != HANDOFF_BYTES:
            raise ValueError(f"ticket: got {longest} characters, a handoff of {len(self.handoff)} bytes")
        if not (0 <= self.port < 1 << 16 and 0 <= self.epoch < 1 << 62):
            raise ValueError(f"ticket: got port {self.port}, epoch {self.epoch}")


class Announced(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """In the place of one kind's bytes in a roles' manifest: where they are, how many parts and bytes."""

    ticket: bytes
    parts: int
    size: int


def pack(value: Ticket | Announced) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Ticket:
    """Raises ValueError for bytes that are no ticket."""
    if len(data) > _LARGEST:
        raise ValueError(f"ticket: got {len(data)} bytes, allowed are {_LARGEST}")
    try:
        return msgspec.msgpack.decode(data, type=Ticket)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"ticket: {error}") from None


def unpack_announced(data: bytes) -> Announced:
    """Raises ValueError for bytes that are none."""
    try:
        return msgspec.msgpack.decode(data, type=Announced)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"part: {error}") from None
