"""Window snapshots: what lets a hit go on exactly, kept in host memory for minutes, to be had from peers.

A snapshot is the encoder's window rings at a block boundary, 1,415,040 bytes for the full model. It is never part of
matching: without one a hit replays 128 tokens, so losing all of them costs time and no hit.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes, parse, seal, verify
from orchestrator.model.config import BLOCK_TOKENS


@dataclass(frozen=True)
class WindowKey:
    """The chain up to a boundary: key of the last block before it, and the boundary in tokens."""

    chain: bytes
    boundary: int

    def __post_init__(self) -> None:
        if self.boundary < BLOCK_TOKENS or self.boundary % BLOCK_TOKENS:
            raise ValueError(f"boundary: got {self.boundary}, allowed are multiples of {BLOCK_TOKENS} above 0")


class Peer(Protocol):
    """Another node's snapshots."""

    def first(self, keys: Sequence[WindowKey]) -> tuple[WindowKey, bytes] | None:
        """Of the first of `keys` that the peer has, the key and the sealed snapshot (see `WindowStore.sealed`).

        None where it has none of them. Raises OSError.
        """


class WindowStore:
    """This node's snapshots.

    Args:
        layout: tag of what the bytes mean (rings, rows, formats); other nodes' bytes must say the same.
        capacity: bytes; the least recently used go first.
        life_s: seconds from the last put or use to the end.
        peers: asked in order, see `pull`.
        clock: seconds, monotonic.
    """

    def __init__(
        self, layout: bytes, capacity: int, life_s: float = 600.0, peers: Sequence[Peer] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        if capacity < 0 or life_s <= 0:
            raise ValueError(f"capacity, life_s: got {capacity}, {life_s}, allowed are at least 0 and above 0")
        self.layout, self.capacity, self.life_s, self.peers = layout, capacity, life_s, tuple(peers)
        self._clock = clock or time.monotonic
        self._kept: OrderedDict[WindowKey, tuple[float, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self.used = 0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: WindowKey, snapshot: bytes) -> bool:
        """Keep a snapshot; one of the same key is replaced. False where it is larger than the whole capacity."""
        sealed = seal(self.layout, key.chain, key.chain, key.boundary, 0, snapshot) + snapshot
        with self._lock:
            return self._keep(key, sealed)

    def drop(self, key: WindowKey) -> None:
        """Forget a snapshot, if it is here."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is not None:
                self.used -= len(kept[1])

    def has(self, key: WindowKey) -> bool:
        """Is it here? Prolongs nothing."""
        with self._lock:
            self._expire()
            return key in self._kept

    def get(self, key: WindowKey) -> bytes | None:
        """The snapshot, verified; None where this node has none. A use prolongs its life."""
        sealed = self.sealed(key)
        return self._opened(key, sealed) if sealed is not None else None

    def sealed(self, key: WindowKey) -> bytes | None:
        """The bytes for a peer: header with layout, key, boundary and checksum, then the snapshot."""
        with self._lock:
            self._expire()
            kept = self._kept.pop(key, None)
            if kept is None:
                self.counters["misses"] += 1
                return None
            self._kept[key] = (self._clock() + self.life_s, kept[1])
            self.counters["hits"] += 1
            return kept[1]

    def peek(self, key: WindowKey) -> bytes | None:
        """The sealed snapshot, if it is here; no use of it."""
        with self._lock:
            kept = self._kept.get(key)
            return None if kept is None else kept[1]

    def first(self, keys: Sequence[WindowKey]) -> tuple[WindowKey, bytes] | None:
        """What this node answers a peer: the first of `keys` that is here, sealed."""
        key = next((key for key in keys if self.has(key)), None)
        sealed = self.sealed(key) if key is not None else None
        return None if key is None or sealed is None else (key, sealed)

    def pull(self, keys: Sequence[WindowKey]) -> WindowKey | None:
        """Have the first of `keys` that is to be had: here, else at the first peer that has one of them.

        Returns its key; `get` gives the snapshot then. A peer that fails or sends other bytes is passed over.
        """
        here = next((key for key in keys if self.has(key)), None)
        wanted = list(keys[: len(keys) if here is None else keys.index(here)])
        for peer in self.peers if wanted else ():
            try:
                found = peer.first(wanted)
            except OSError:
                self.counters["peer_errors"] += 1
                continue
            if found is not None and found[0] in wanted:
                key, sealed = found
                snapshot = self._opened(key, sealed)
                if snapshot is not None:
                    self.counters["pulled"] += 1
                    with self._lock:
                        self._keep(key, sealed[: HEADER_BYTES + len(snapshot)])
                    return key
        return here

    def _opened(self, key: WindowKey, sealed: bytes) -> bytes | None:
        try:
            snapshot = verify(sealed, self.layout, key.chain)
            if parse(sealed).depth != key.boundary:
                raise WrongBytes("boundary")
        except WrongBytes:
            self.counters["wrong"] += 1
            return None
        return snapshot

    def _keep(self, key: WindowKey, sealed: bytes) -> bool:
        self._expire()
        old = self._kept.pop(key, None)
        if old is not None:
            self.used -= len(old[1])
        if len(sealed) > self.capacity:
            return False
        while self.used + len(sealed) > self.capacity:
            self.used -= len(self._kept.popitem(last=False)[1][1])
        self._kept[key] = (self._clock() + self.life_s, sealed)
        self.used += len(sealed)
        return True

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            key, (until, sealed) = next(iter(self._kept.items()))
            if until > now:
                return
            del self._kept[key]
            self.used -= len(sealed)
