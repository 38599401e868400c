"""Giving back the space of segment files that are mostly dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes, verify
from orchestrator.cache.entry import Entry

if TYPE_CHECKING:
    from orchestrator.cache.store.embedded import EmbeddedStore

SPARSE = 0.25
PRESSED = 0.95
"""Of the capacity: above it, files that are at most this full are emptied too, at the cost of copying more."""


def compact(store: EmbeddedStore) -> None:
    """Move what is left of the emptiest segment to the current one, if it is sparse or files fill the capacity."""
    share = SPARSE
    if store.segments.used > PRESSED * store.capacity:
        store.segments.rotate()
        share = PRESSED
    for number in store.segments.sparse(share)[:1]:
        _empty(store, [entry for entry in store.index if entry.place.segment == number])


def _empty(store: EmbeddedStore, entries: Sequence[Entry]) -> None:
    """Copy blocks that verify; those that do not are dropped instead of being carried on."""
    found: list[tuple[Entry, tuple[bytes, bytes]]] = []
    for entry in entries:
        try:
            data = store.segments.read(entry.place)
            payload = verify(data, store.layout, entry.key, entry.generation)
        except WrongBytes:
            store.drop_lost(entry)
        except OSError:
            return
        else:
            found.append((entry, (data[:HEADER_BYTES], payload)))
    kept = [(entry, whole) for entry, whole in found if store.index.get(entry.key) is entry]
    try:
        places = store.segments.append([whole for _, whole in kept])
    except OSError:
        return
    store.move([entry for entry, _ in kept], places)
