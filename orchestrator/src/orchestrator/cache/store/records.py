"""Durable records of visible blocks, in LMDB: key -> where its bytes are and until when it stays."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from orchestrator.cache.store.base import At, nowhere
from orchestrator.cache.store.segments import Place

_RECORD = struct.Struct("<B32sIQQQIdd")
_VERSION = 1

Change = tuple[str, bytes, bytes | None]
"""Table, key, and what to put there; None removes it."""


@dataclass(frozen=True)
class Record:
    """One visible block."""

    parent: bytes
    depth: int
    generation: int
    place: Place
    atime: float
    expiry: float
    tenant: str

    def encode(self) -> bytes:
        place = self.place
        fixed = _RECORD.pack(_VERSION, self.parent, self.depth, self.generation, place.segment, place.offset,
                             place.size, self.atime, self.expiry)  # fmt: skip
        return fixed + self.tenant.encode()

    @staticmethod
    def decode(value: bytes) -> Record:
        """Raises ValueError for values of another version or length."""
        if len(value) < _RECORD.size or value[0] != _VERSION:
            raise ValueError("record: got other bytes than this version writes")
        _, parent, depth, generation, segment, offset, size, atime, expiry = _RECORD.unpack_from(value)
        place = Place(segment, offset, size)
        return Record(parent, depth, generation, place, atime, expiry, value[_RECORD.size :].decode())


class Records:
    """The record file of a store: tables of bytes, `blocks` among them.

    Every change is one durable transaction; it is kept whole or not at all.
    """

    def __init__(self, folder: Path, map_bytes: int, at: At = nowhere, tables: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._at = at
        names = ("blocks", "facts", *tables)
        self._env = lmdb.open(str(folder), map_size=map_bytes, max_dbs=len(names), metasync=True, sync=True)
        self._tables = {name: self._env.open_db(name.encode()) for name in names}
        self.unreadable: list[bytes] = []

    def fact(self, name: str, value: bytes) -> bytes:
        """A value that is set once, with the first opening: what is kept under `name` since then."""
        with self._env.begin(db=self._tables["facts"], write=True) as txn:
            txn.put(name.encode(), value, overwrite=False)
            return bytes(txn.get(name.encode()) or b"")

    def put(self, records: Iterable[tuple[bytes, Record]], also: Iterable[Change] = ()) -> None:
        """Raises lmdb.Error (map or disk full); nothing of the call is visible then."""
        self._at("records.begin")
        with self._env.begin(write=True) as txn:
            for key, record in records:
                txn.put(key, record.encode(), db=self._tables["blocks"])
            self._change(txn, also)
            self._at("records.commit")
        self._at("records.done")

    def delete(self, keys: Iterable[bytes], also: Iterable[Change] = ()) -> None:
        """Raises lmdb.Error; all records stay then."""
        self._at("records.delete")
        with self._env.begin(write=True) as txn:
            for key in keys:
                txn.delete(key, db=self._tables["blocks"])
            self._change(txn, also)
        self._at("records.deleted")

    def __iter__(self) -> Iterator[tuple[bytes, Record]]:
        for key, value in self.table("blocks"):
            try:
                record = Record.decode(value)
            except ValueError:
                self.unreadable.append(key)
            else:
                yield key, record

    def table(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        """All of a table, in the order of its keys."""
        with self._env.begin(db=self._tables[name]) as txn:
            for key, value in txn.cursor():
                yield bytes(key), bytes(value)

    def close(self) -> None:
        self._env.close()

    def _change(self, txn: lmdb.Transaction, changes: Iterable[Change]) -> None:
        for table, key, value in changes:
            if value is None:
                txn.delete(key, db=self._tables[table])
            else:
                txn.put(key, value, db=self._tables[table])
