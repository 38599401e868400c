"""A shard at rest: a page of header, then the body. The one definition for writer, reader and repair."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c

from orchestrator.cache.block_object import WrongBytes
from orchestrator.cache.chain import KEY_BYTES
from orchestrator.cache.erasure.code import CODE_ID, SHARDS

MAGIC = b"FTHMSHD\x00"
VERSION = 1
HEADER_BYTES = 4096
STRIPE_BLOCKS = 32
_HEADER = struct.Struct("<8sHHQQIIIIHH32s32s")
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Stripe:
    """What all shards of a stripe agree on.

    Attributes:
        number: never used again.
        generation: that of the write; a repair keeps it.
        layout: `BlockLayout.tag`.
        parent: key before the first block.
        depth: the first block's number in its chain.
        block_bytes: bytes of each block.
        keys: the blocks, at most 32, one after the other in their chain.
    """

    number: int
    generation: int
    layout: bytes
    parent: bytes
    depth: int
    block_bytes: int
    keys: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= STRIPE_BLOCKS:
            raise ValueError(f"keys: got {len(self.keys)}, allowed are 1 to {STRIPE_BLOCKS}")

    @property
    def size(self) -> int:
        """Bytes of its blocks."""
        return len(self.keys) * self.block_bytes


def name(stripe: int, shard: int) -> str:
    """What a shard is called on its target."""
    return f"{stripe:016x}-{shard:02d}"


def parse_name(text: str) -> tuple[int, int] | None:
    """Stripe and shard, None for other names."""
    stripe, _, shard = text.partition("-")
    try:
        found = int(stripe, 16), int(shard)
    except ValueError:
        return None
    return found if name(*found) == text else None


def seal(stripe: Stripe, shard: int, body: bytes) -> bytes:
    """Header and body."""
    fixed = _HEADER.pack(MAGIC, VERSION, CODE_ID, stripe.number, stripe.generation, shard, len(body),
                         stripe.block_bytes, stripe.depth, len(stripe.keys), SHARDS, stripe.layout,
                         stripe.parent)  # fmt: skip
    head = (fixed + b"".join(stripe.keys)).ljust(HEADER_BYTES - _CRC.size, b"\0")
    return head + _CRC.pack(google_crc32c.extend(google_crc32c.value(head), body)) + body


def verify(data: bytes, stripe: Stripe, shard: int) -> bytes:
    """The body. Raises `WrongBytes` unless the bytes are this shard of this stripe, of this generation, whole."""
    found, number, body = open_shard(data)
    if number != shard or found.number != stripe.number:
        raise WrongBytes("key")
    if found.generation != stripe.generation:
        raise WrongBytes("generation")
    if found != stripe:
        raise WrongBytes("layout")
    return body


def open_shard(data: bytes) -> tuple[Stripe, int, bytes]:
    """Stripe, shard number and body of bytes that answer for themselves: what a lost index is made from again."""
    if len(data) < HEADER_BYTES:
        raise WrongBytes("short")
    magic, version, code, number, generation, shard, size, block, depth, count, _, layout, parent = _HEADER.unpack_from(
        data
    )
    if magic != MAGIC:
        raise WrongBytes("magic")
    if (version, code) != (VERSION, CODE_ID):
        raise WrongBytes("version")
    body = data[HEADER_BYTES : HEADER_BYTES + size]
    if len(body) < size:
        raise WrongBytes("short")
    head = data[: HEADER_BYTES - _CRC.size]
    if _CRC.unpack_from(data, HEADER_BYTES - _CRC.size)[0] != google_crc32c.extend(google_crc32c.value(head), body):
        raise WrongBytes("checksum")
    return Stripe(number, generation, layout, parent, depth, block, _keys(data, count)), shard, body


def _keys(data: bytes, count: int) -> tuple[bytes, ...]:
    start = _HEADER.size
    return tuple(data[start + n * KEY_BYTES : start + (n + 1) * KEY_BYTES] for n in range(count))
