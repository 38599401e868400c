"""What engines and the I/O process say to each other: msgpack, each message behind its length."""

from __future__ import annotations

import socket
import struct

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """All messages. `id` is chosen by the engine; answers carry it back."""

    id: int


class Match(Message, frozen=True):
    """How many of these first keys are there? Renews nothing."""

    keys: list[bytes]


class Matched(Message, frozen=True):
    blocks: int


class Find(Message, frozen=True):
    """Which is the first of these keys, of any paths, that is there? Renews nothing."""

    keys: list[bytes]


class Found(Message, frozen=True):
    """Its place among the keys, or -1."""

    number: int


class Fetch(Message, frozen=True):
    """Bring blocks into the host tier and pin them for this engine. `parent` and `depth` are those of the first."""

    keys: list[bytes]
    parent: bytes
    depth: int
    deadline_s: float


class Fetched(Message, frozen=True):
    """(slot, generation) of the blocks that have come, from the first on without a gap. Pinned until `Release`."""

    slots: list[tuple[int, int]]


class Release(Message, frozen=True):
    """The engine is done with a fetch, or no longer wants it."""


class Reserve(Message, frozen=True):
    """Slots to write new blocks into."""

    count: int


class Reserved(Message, frozen=True):
    slots: list[tuple[int, int]]


class Written(msgspec.Struct, frozen=True):
    """A slot that the engine has filled."""

    slot: int
    generation: int
    key: bytes
    parent: bytes
    depth: int


class Commit(Message, frozen=True):
    """Publish and persist filled slots, parents first; slots of the reservation that are not named are given back."""

    blocks: list[Written]
    retention: int
    tenant: str


class Committed(Message, frozen=True):
    """What became of each block (`Put` values)."""

    puts: list[str]


class Use(Message, frozen=True):
    """A hit was adopted: prolong the stay of this path."""

    keys: list[bytes]
    retention: int


class Pin(Message, frozen=True):
    """Hold a path in the store."""

    keys: list[bytes]
    seconds: float


class Pinned(Message, frozen=True):
    lease: int | None


class Unpin(Message, frozen=True):
    """`id` is the one of the `Pin`."""


class Ask(Message, frozen=True):
    """For `Numbers`."""


class Numbers(Message, frozen=True):
    values: dict[str, float]


Request = Match | Find | Fetch | Release | Reserve | Commit | Use | Pin | Unpin | Ask
Answer = Matched | Found | Fetched | Reserved | Committed | Pinned | Numbers

_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Request).decode
_answer = msgspec.msgpack.Decoder(Answer).decode
_LENGTH = struct.Struct("<I")
MAX_BYTES = 64 << 20


def send(to: socket.socket, message: Message) -> None:
    """Raises OSError where the other side is gone."""
    data = _encode(message)
    to.sendall(_LENGTH.pack(len(data)) + data)


def frame(message: Message) -> bytes:
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


class Inbox:
    """Cuts a stream of bytes into messages. Raises ValueError (msgspec's, or for lengths) for what is none."""

    def __init__(self, answers: bool) -> None:
        self._decode = _answer if answers else _request
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._data += data
        found: list[Message] = []
        while len(self._data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data)
            if size > MAX_BYTES:
                raise ValueError(f"message: got {size} bytes, allowed are {MAX_BYTES}")
            end = _LENGTH.size + size
            if len(self._data) < end:
                break
            found.append(self._decode(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return found
