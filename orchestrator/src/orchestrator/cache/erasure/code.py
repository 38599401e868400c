"""The code over a stripe: ten data shards, two of parity, any ten give the stripe back.

ISA-L through pyeclib, matrix `isa_l_rs_vand`: the first parity is the XOR of the data, the second the RAID-6 Q. Shards
on disk are bare; the frames that the library wants around them depend on sizes only and are made once a size.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache

from pyeclib.ec_iface import ECDriver, ECDriverError

CODE_ID = 1
"""Names matrix and order of shards in every shard's header."""
DATA, PARITY = 10, 2
SHARDS = DATA + PARITY
_lock = threading.Lock()


def shard_size(size: int) -> int:
    """Bytes of each shard of a stripe; its end is filled with zeros to a multiple of 10 x 16 bytes."""
    return -(-size // (DATA * 16)) * 16


def encode(data: bytes) -> list[bytes]:
    """The twelve shards of a stripe."""
    size = shard_size(len(data))
    padded = data if len(data) == size * DATA else data.ljust(size * DATA, b"\0")
    head = len(_frames(size)[0])
    return [bytes(fragment[head:]) for fragment in _driver().encode(padded)]


def decode(shards: Mapping[int, bytes], size: int) -> bytes:
    """The stripe from any ten shards by number, cut to `size` bytes. Raises ValueError for fewer or unlike ones."""
    chosen = _ten(shards, size)
    if all(number < DATA for number in chosen):
        return b"".join(shards[number] for number in range(DATA))[:size]
    frames = _frames(shard_size(size))
    try:
        return bytes(_driver().decode([frames[n] + shards[n] for n in chosen]))[:size]
    except ECDriverError as error:
        raise ValueError(f"shards: could not be decoded: {error}") from error


def rebuild(shards: Mapping[int, bytes], missing: Sequence[int], size: int) -> dict[int, bytes]:
    """Shards that are missing, from any ten others."""
    whole = encode(decode(shards, size))
    return {number: whole[number] for number in missing}


def _ten(shards: Mapping[int, bytes], size: int) -> list[int]:
    chosen = sorted(shards)[:DATA]
    if len(chosen) < DATA or not all(0 <= n < SHARDS for n in chosen):
        raise ValueError(f"shards: got {sorted(shards)}, allowed are {DATA} or more of 0 to {SHARDS - 1}")
    if any(len(shards[n]) != shard_size(size) for n in chosen):
        raise ValueError(f"shards: allowed are {shard_size(size)} bytes each for a stripe of {size}")
    return chosen


@lru_cache(maxsize=1)
def _driver() -> ECDriver:
    return ECDriver(k=DATA, m=PARITY, ec_type="isa_l_rs_vand")


@lru_cache(maxsize=256)
def _frames(size: int) -> tuple[bytes, ...]:
    with _lock:
        fragments = _driver().encode(bytes(size * DATA))
    return tuple(bytes(fragment[: len(fragment) - size]) for fragment in fragments)
