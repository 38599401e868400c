"""What both sides of a transfer say, and how it looks as bytes.

A frame is a prefix (`FTX1`, bytes of the message, bytes of the payload, CRC32C of both lengths and the message), the
message as msgpack, and the payload of a `Piece`, whose own CRC32C is in the message.
"""

from __future__ import annotations

import struct

import google_crc32c
import msgspec

from orchestrator.transfer.errors import LinkBroken

MAGIC = b"FTX1"
PREFIX = struct.Struct("<4sIQI")
MESSAGE_BYTES = 4096
_LENGTHS = struct.Struct("<IQ")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all."""


class Ask(Message, frozen=True):
    """Receiver, first on every link.

    Attributes:
        pull: random bytes of this receiver's attempt, the same on all its links.
        sender: what `Welcome` said on the first link; empty there.
        taken: parts that its owner has. next: parts that came whole. window: see `Limits.window`.
    """

    handoff: bytes
    epoch: int
    pull: bytes
    sender: bytes
    taken: int
    next: int
    window: int


class Welcome(Message, frozen=True):
    """Sender's answer, with random bytes of its own; parts follow from `Ask.next` on."""

    sender: bytes


class Refused(Message, frozen=True):
    """Sender's answer to what it will not do, or the end of what it began. The link ends."""

    reason: str
    why: str


class Piece(Message, frozen=True):
    """A part: its number counted from 0, name, CRC32C of the payload."""

    number: int
    name: str
    crc: int


class End(Message, frozen=True):
    """There are no more than `count` parts."""

    count: int


class Ack(Message, frozen=True):
    """The receiver's owner has the first `taken` parts."""

    taken: int


class Verdict(Message, frozen=True):
    """The receiver's owner has made use of all (`good`), or will make none."""

    good: bool
    why: str


class Closed(Message, frozen=True):
    """The sender has freed what it held: the answer to `Verdict`."""


class Alive(Message, frozen=True):
    """Nothing new."""


class Staged(Message, frozen=True):
    """Within a payload that does not follow in the stream: its next bytes lie in memory of the sender.

    Attributes:
        segment: name of the memory for a transfer engine. life: random bytes of whoever has that name now.
        address, size: where in it, and how many.
    """

    segment: str
    life: bytes
    address: int
    size: int


class Copied(Message, frozen=True):
    """The receiver has read the first `count` of what was staged on this link."""

    count: int


class Kept(Message, frozen=True):
    """The sender has kept them unchanged until it heard so: what was read may be used."""

    count: int


Any = Ask | Welcome | Refused | Piece | End | Ack | Verdict | Closed | Alive | Staged | Copied | Kept
_DECODER = msgspec.msgpack.Decoder(Any)
_ENCODER = msgspec.msgpack.Encoder()


def pack(message: Any, payload_bytes: int) -> bytes:
    """Prefix and message of a frame."""
    body = _ENCODER.encode(message)
    if len(body) > MESSAGE_BYTES:
        raise ValueError(f"message: got {len(body)} bytes, allowed are {MESSAGE_BYTES}")
    crc = google_crc32c.value(_LENGTHS.pack(len(body), payload_bytes) + body)
    return PREFIX.pack(MAGIC, len(body), payload_bytes, crc) + body


def lengths_of(prefix: bytes) -> tuple[int, int, int]:
    """Bytes of message and payload, and the checksum. Raises LinkBroken before anything is allocated for them."""
    magic, size, payload, crc = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise LinkBroken(f"prefix: got {magic!r}, allowed is {MAGIC!r}", "message")
    if not 0 < size <= MESSAGE_BYTES:
        raise LinkBroken(f"message: got {size} bytes, allowed are 1 to {MESSAGE_BYTES}", "size")
    return size, payload, crc


def unpack(body: bytes, payload_bytes: int, crc: int) -> Any:
    """Raises LinkBroken for changed bytes, and for what is no message."""
    if google_crc32c.value(_LENGTHS.pack(len(body), payload_bytes) + body) != crc:
        raise LinkBroken("message: its bytes differ from those of its checksum", "checksum")
    try:
        message = _DECODER.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise LinkBroken(f"message: {error}", "message") from None
    if payload_bytes and not isinstance(message, Piece):
        raise LinkBroken(f"{type(message).__name__}: got {payload_bytes} bytes behind it, allowed is none", "message")
    return message
