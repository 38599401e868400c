"""A block at rest: header, then payload. The one definition for all who write or read block bytes.

The header names what the bytes are (format version, layout, key, parent, generation), the checksum covers header and
payload. Bytes that do not answer to all of it are a miss, never an answer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c

from orchestrator.cache.chain import KEY_BYTES

MAGIC = b"FTHMBLK\x00"
VERSION = 1
_HEADER = struct.Struct("<8sHHI32s32s32sQI")
HEADER_BYTES = 128
_FILL = b"\0" * (HEADER_BYTES - _HEADER.size - 4)
_CRC = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


class WrongBytes(Exception):
    """Bytes that are not the block that was asked for; `reason` is a word for a counter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Header:
    """What a block's bytes say that they are. `depth` is the block's number in its chain, `generation` counts
    the times that the place was written."""

    layout: bytes
    key: bytes
    parent: bytes
    depth: int
    generation: int
    size: int


def seal(layout: bytes, key: bytes, parent: bytes, depth: int, generation: int, payload: Buffer) -> bytes:
    """The header to store before `payload`."""
    for name, value in (("layout", layout), ("key", key), ("parent", parent)):
        if len(value) != KEY_BYTES:
            raise ValueError(f"{name}: got {len(value)} bytes, allowed are {KEY_BYTES}")
    head = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, len(payload), layout, key, parent, generation, depth) + _FILL
    crc = google_crc32c.extend(google_crc32c.value(head), _contiguous(payload))
    return head + _CRC.pack(crc)


def parse(data: Buffer) -> Header:
    """Read a header without its payload. Raises `WrongBytes` for other magic, versions or lengths."""
    if len(data) < HEADER_BYTES:
        raise WrongBytes("short")
    magic, version, length, size, layout, key, parent, generation, depth = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WrongBytes("magic")
    if version != VERSION or length != HEADER_BYTES:
        raise WrongBytes("version")
    return Header(layout, key, parent, depth, generation, size)


def verify(data: Buffer, layout: bytes, key: bytes, generation: int | None = None) -> bytes:
    """The payload of `data` (header, payload, perhaps more), copied out before it is checked.

    A copy, since the memory may be written while it is read. Raises `WrongBytes` unless layout, key, generation
    (where given) and checksum answer.
    """
    whole = bytes(data)
    header = parse(whole)
    if header.layout != layout:
        raise WrongBytes("layout")
    if header.key != key:
        raise WrongBytes("key")
    if generation is not None and header.generation != generation:
        raise WrongBytes("generation")
    end = HEADER_BYTES + header.size
    if len(whole) < end:
        raise WrongBytes("short")
    payload = whole[HEADER_BYTES:end]
    crc = google_crc32c.extend(google_crc32c.value(whole[: HEADER_BYTES - 4]), payload)
    if _CRC.unpack_from(whole, HEADER_BYTES - 4)[0] != crc:
        raise WrongBytes("checksum")
    return payload


def _contiguous(data: Buffer) -> bytes:
    """google-crc32c takes bytes only."""
    return data if isinstance(data, bytes) else bytes(data)
