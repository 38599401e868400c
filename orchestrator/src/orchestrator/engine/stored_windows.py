"""Window snapshots in the store that engines share: a path of blocks of their own, so every kind of store keeps them.

A sealed snapshot (`WindowStore.sealed`) is cut into pieces of a block's size, the last filled up. Their keys follow
from what the snapshot is of; a piece is visible after those before it, so the last one says that all are there.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence

from orchestrator.cache.chain import Chain, framed
from orchestrator.cache.client import CacheClient, Plan
from orchestrator.cache.retention import Retention
from orchestrator.cache.windows import WindowKey
from orchestrator.engine.store_writer import Job, StoreWriter

_DOMAIN = b"fathom-window-pieces/1"
_MOST_ASKED = 1024


class StoredWindows:
    """A `windows.Peer` over the store, and what puts snapshots there.

    Args:
        layout: `WindowStore.layout`; snapshots of another one have other keys.
        sealed_bytes: of a sealed snapshot.
        block_bytes: payload of a block of the store.
        deadline_s: that bringing a snapshot may take.
    """

    def __init__(
        self, client: CacheClient, writer: StoreWriter, layout: bytes, sealed_bytes: int, block_bytes: int,
        deadline_s: float,
    ) -> None:  # fmt: skip
        self.client, self.writer, self.layout, self.deadline_s = client, writer, layout, deadline_s
        self.sealed_bytes, self.block_bytes = sealed_bytes, block_bytes
        self.pieces = -(-sealed_bytes // block_bytes)
        self.counts: Counter[str] = Counter()

    def put(self, key: WindowKey, sealed: bytes, retention: Retention, tenant: str) -> None:
        """Have a snapshot stored, soon or not at all."""
        whole = sealed.ljust(self.pieces * self.block_bytes, b"\0")
        cut = [whole[at : at + self.block_bytes] for at in range(0, len(whole), self.block_bytes)]
        path = self._path(key)
        self.writer.put(Job(path.root, path.keys, 0, cut, retention, tenant))

    def first(self, keys: Sequence[WindowKey]) -> tuple[WindowKey, bytes] | None:
        """See `windows.Peer`. Waits for the I/O process, which may hang: `CacheClient.answer_s` and `deadline_s`."""
        paths = [self._path(key) for key in keys[:_MOST_ASKED]]
        found = self.client.find([path.keys[-1] for path in paths])
        if found is None:
            self.counts["absent"] += 1
            return None
        plan = Plan(paths[found], self.pieces)
        fetch = self.client.fetch(plan, self.deadline_s)
        try:
            fetch.wait(self.deadline_s + 1.0)
            parts = [fetch.payload(number) for number in range(fetch.blocks)]
        finally:
            fetch.release()
        whole = b"".join(part for part in parts if part is not None)
        if len(whole) < self.pieces * self.block_bytes:
            self.counts["cut"] += 1
            return None
        self.client.use(plan, self.pieces)
        self.counts["brought"] += 1
        return keys[found], whole[: self.sealed_bytes]

    def _path(self, key: WindowKey) -> Chain:
        root = hashlib.sha256(framed(_DOMAIN, self.layout, key.chain, struct.pack("<Q", key.boundary))).digest()
        path = Chain(root)
        path.keys = [hashlib.sha256(framed(root, struct.pack("<Q", number))).digest() for number in range(self.pieces)]
        return path
