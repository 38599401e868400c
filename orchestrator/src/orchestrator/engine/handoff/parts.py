"""What a request travels in: named parts of bytes, each of which says what it is.

A part is sealed as a cache block is (`cache.block_object`): version, length and CRC32C of its bytes, a tag of what they
mean, the handoff that they belong to, their name, and their number in it. Whoever moves parts needs to know none of it.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from orchestrator.cache.block_object import HEADER_BYTES, Buffer, WrongBytes, parse, seal, verify
from orchestrator.cache.chain import KEY_BYTES, framed

OFFER, TOKENS, STATE, MANIFEST = "offer", "tokens", "state", "manifest"
FORMAT = hashlib.sha256(b"fathom-handoff/1").digest()
"""Tag of an offer, which says what the tag of the other parts has to be."""


class Part(NamedTuple):
    """A name, and bytes, or anything with a buffer of bytes."""

    name: str
    data: Buffer


class HandoffRefused(RuntimeError):
    """Bytes that are not what they should be, or a request that cannot come in; the engine is as it was.

    `reason` is a word for a counter: "short", "magic", "version", "checksum", "layout", "model", "order" (another part
    is next, or this one has come already), "key" (another name, or a part of another handoff), "part" (no part of such
    a handoff), "size", "state", "incomplete", "room", "id", "context", "tokenizer", "ended".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def rows_part(layer: int, first: int, count: int) -> str:
    """Name of the global rows of one source layer in `count` blocks from the request's block `first` on."""
    return f"rows/{layer}/{first}/{count}"


def window_part(layer: int) -> str:
    """Name of one layer's window ring; layers behind the last are draft stages."""
    return f"window/{layer}"


def image_part(number: int) -> str:
    """Name of the embeddings of one of the prompt's images, counted from 0."""
    return f"image/{number}"


def tail_part(layer: int) -> str:
    """Name of one source layer's compressor tail."""
    return f"tail/{layer}"


def numbers_of(name: str, kind: str, count: int) -> tuple[int, ...]:
    """The numbers in a name of this kind. Raises HandoffRefused for a name that is none."""
    head, *rest = name.split("/")
    if head != kind or len(rest) != count or not all(n.isascii() and n.isdecimal() and n == str(int(n)) for n in rest):
        raise HandoffRefused("part", f"part: got the name {name!r}, allowed is {kind} with {count} numbers behind it")
    return tuple(map(int, rest))


def seal_part(tag: bytes, handoff: bytes, number: int, name: str, payload: Buffer) -> Part:
    """`tag` and `handoff` are 32 bytes each; `number` counts the handoff's parts from 0 on."""
    header = seal(tag, _key(handoff, name), handoff, number, 0, payload)
    return Part(name, header + payload)


def number_of(data: Buffer) -> int:
    """A part's number, for a transport that has lost their order. Raises HandoffRefused for bytes that are no part."""
    try:
        return parse(data).depth
    except WrongBytes as error:
        raise refused(error.reason, "") from None


def handoff_of(data: Buffer) -> bytes:
    """The handoff that a part belongs to, 32 bytes, before it is verified. Raises HandoffRefused as `number_of`."""
    try:
        return parse(data).parent
    except WrongBytes as error:
        raise refused(error.reason, "") from None


def open_part(tag: bytes, handoff: bytes, number: int, name: str, data: Buffer) -> bytes:
    """A copy of a part's bytes, verified. Raises HandoffRefused unless all that it says of itself answers."""
    try:
        header = parse(data)
        if header.parent != handoff:
            raise WrongBytes("key")
        payload = verify(data, tag, _key(handoff, name))
        if len(data) != HEADER_BYTES + len(payload):
            raise WrongBytes("size")
    except WrongBytes as error:
        raise refused(error.reason, name) from None
    if header.depth != number:
        raise HandoffRefused("order", f"part {name!r}: got number {header.depth}, allowed is {number}, the next one")
    return payload


def refused(reason: str, name: str) -> HandoffRefused:
    what = {
        "short": "fewer bytes than its header says",
        "magic": "bytes that are no part of a handoff",
        "version": "another version of the format",
        "layout": "another layout of rows or another model",
        "key": "another name or handoff in its header",
        "checksum": "other bytes than those of its checksum",
        "size": "more bytes than its header says",
    }
    return HandoffRefused(reason, f"part {name!r}: got {what.get(reason, reason)}")


def _key(handoff: bytes, name: str) -> bytes:
    if len(handoff) != KEY_BYTES:
        raise ValueError(f"handoff: got {len(handoff)} bytes, allowed are {KEY_BYTES}")
    return hashlib.sha256(framed(handoff, name.encode())).digest()
