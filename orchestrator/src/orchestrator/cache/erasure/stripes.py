"""What the index keeps of each stripe: where its shards are, which are missing, how many of its blocks are in use."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec

from orchestrator.cache.erasure.code import SHARDS, shard_size
from orchestrator.cache.erasure.shard import HEADER_BYTES, Stripe
from orchestrator.cache.store.records import Change

TABLE = "stripes"
_NUMBER = struct.Struct(">Q")


class StripeRecord(msgspec.Struct):
    """A stripe's place: `targets[n]` holds shard n, except for those in `missing`."""

    number: int
    generation: int
    parent: bytes
    depth: int
    block_bytes: int
    keys: list[bytes]
    targets: list[str]
    missing: list[int]

    def stripe(self, layout: bytes) -> Stripe:
        return Stripe(self.number, self.generation, layout, self.parent, self.depth, self.block_bytes, tuple(self.keys))

    @property
    def stored_bytes(self) -> int:
        """Bytes on all targets."""
        return SHARDS * (HEADER_BYTES + shard_size(len(self.keys) * self.block_bytes))

    def change(self) -> Change:
        return TABLE, _NUMBER.pack(self.number), msgspec.msgpack.encode(self)

    def removal(self) -> Change:
        return TABLE, _NUMBER.pack(self.number), None


class Stripes:
    """All stripes of a store in memory."""

    def __init__(self, saved: Iterable[tuple[bytes, bytes]]) -> None:
        decode = msgspec.msgpack.Decoder(StripeRecord).decode
        self._records = {record.number: record for _, value in saved for record in (decode(value),)}
        self.live = dict.fromkeys(self._records, 0)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StripeRecord]:
        return iter(list(self._records.values()))

    @property
    def used(self) -> int:
        """Bytes of all stripes on all targets."""
        return sum(record.stored_bytes for record in self._records.values())

    def get(self, number: int) -> StripeRecord | None:
        return self._records.get(number)

    def add(self, record: StripeRecord) -> None:
        self._records[record.number] = record
        self.live[record.number] = len(record.keys)

    def adopt(self, number: int, position: int, key: bytes) -> bool:
        """Count a block that a record places here. False where the stripe is not known or holds another key there."""
        record = self._records.get(number)
        if record is None or position >= len(record.keys) or record.keys[position] != key:
            return False
        self.live[number] += 1
        return True

    def free(self, number: int) -> None:
        """One block of the stripe is no longer in use."""
        self.live[number] -= 1

    def take_dead(self) -> list[StripeRecord]:
        """Stripes of which no block is in use, taken out."""
        numbers = [number for number, live in self.live.items() if not live]
        for number in numbers:
            del self.live[number]
        return [self._records.pop(number) for number in numbers]
