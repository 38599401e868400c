"""What the core's actions do to store and arena. Called from any thread; each returns the event that answers it."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

from orchestrator.cache.block_object import WrongBytes
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.io import messages as m
from orchestrator.cache.io.events import Load, Loaded, LoadItem, Persist, Persisted, Probe, Probed, Send, StoreCall
from orchestrator.cache.retention import Retention
from orchestrator.cache.store.base import Block, Put, Store

LOAD_BLOCKS = 32
"""Blocks read by one call of the store: a stripe of the erasure-coded one."""


def runs(load: Load) -> list[list[LoadItem]]:
    """A load in pieces for several threads, first blocks first."""
    return [load.items[at : at + LOAD_BLOCKS] for at in range(0, len(load.items), LOAD_BLOCKS)]


def load_blocks(store: Store, arena: HostArena, items: Sequence[LoadItem]) -> list[Loaded]:
    """Read from the store into slots. Whatever goes wrong is a miss."""
    try:
        payloads = store.read([item.key for item in items])
    except Exception:  # a store's own trouble must not end the process that others read through
        payloads = [None] * len(items)
    done = []
    for item, payload in zip(items, payloads, strict=True):
        ok = payload is not None
        try:
            if payload is not None:
                arena.write(item.slot, item.key, item.parent, item.depth, item.generation, payload)
        except (ValueError, struct.error):  # of another size, or a request with an impossible key or depth
            ok = False
        done.append(Loaded(item, ok))
    return done


def persist(store: Store, arena: HostArena, action: Persist) -> Persisted:
    """Check what an engine wrote into slots, then store it."""
    blocks: list[Block] = []
    message = action.message
    for written in message.blocks:
        try:
            payload = arena.read(written.slot, written.key, written.generation)
            retention = Retention(message.retention)
            block = Block(written.key, written.parent, written.depth, payload, retention, message.tenant)
        except (WrongBytes, ValueError):
            break
        blocks.append(block)
    try:
        puts = store.write(blocks, time.time())
    except Exception:
        puts = [Put.FAILED] * len(blocks)
    rest = len(message.blocks) - len(blocks)
    return Persisted(action.client, message, puts + [Put.FAILED] * rest, [True] * len(blocks) + [False] * rest)


def probe(store: Store, action: Probe) -> Probed:
    try:
        present = store.present(action.keys)
    except Exception:
        present = [False] * len(action.keys)
    return Probed(action.client, action.id, action.keys, present, action.find)


class StoreCalls:
    """Uses and pins; remembers which engine holds which lease."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._leases: dict[tuple[int, int], int] = {}

    def do(self, action: StoreCall) -> list[Send]:
        now = time.time()
        match action.message:
            case m.Use(_, keys, retention):
                self._store.use(keys, now, Retention(retention))
            case m.Pin(id, keys, seconds):
                lease = self._store.pin(keys, now + seconds)
                if lease is not None:
                    self._leases[action.client, id] = lease
                return [Send(action.client, m.Pinned(id, lease))]
            case m.Unpin(id):
                self._end([(action.client, id)])
        return []

    def left(self, client: int) -> None:
        """An engine is gone and holds nothing any more."""
        self._end([held for held in self._leases if held[0] == client])

    def _end(self, held: Sequence[tuple[int, int]]) -> None:
        for one in held:
            lease = self._leases.pop(one, None)
            if lease is not None:
                self._store.unpin(lease)
