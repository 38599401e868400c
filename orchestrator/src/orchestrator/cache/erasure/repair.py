"""Keeping stripes whole: shards made again, short stripes joined, orphans found."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import lmdb

from orchestrator.cache.entry import Entry
from orchestrator.cache.erasure import code, shard
from orchestrator.cache.erasure.placement import replacement
from orchestrator.cache.erasure.shard import STRIPE_BLOCKS
from orchestrator.cache.erasure.stripes import StripeRecord
from orchestrator.cache.erasure.write import store_stripe
from orchestrator.cache.gc import orphans

if TYPE_CHECKING:
    from orchestrator.cache.erasure.store import ErasureStore


def repair(store: ErasureStore, limit: int = 64) -> int:
    """Make missing shards of up to `limit` stripes again. Returns how many shards were."""
    write_off(store)
    made = 0
    for record in [record for record in store.stripes if record.missing][:limit]:
        made += _repair_one(store, record)
    return made


def write_off(store: ErasureStore) -> None:
    """Shards of targets that have been dead for long count as missing."""
    now = store.pool._clock()
    gone = {name for name, since in store.pool.dead().items() if now - since >= store.rebuild_after_s}
    for record in store.stripes:
        lost = [n for n, target in enumerate(record.targets) if target in gone and n not in record.missing]
        if lost and len(record.missing) + len(lost) <= code.PARITY:
            record.missing = sorted([*record.missing, *lost])


def _repair_one(store: ErasureStore, record: StripeRecord) -> int:
    stripe = record.stripe(store.layout)
    result = store.pool.read(stripe, record.targets, record.missing)
    store._note(record.number, list(record.targets), result)
    if not result.bodies or store.stripes.get(record.number) is not record:
        return 0
    bodies = code.rebuild(result.bodies, record.missing, stripe.size)
    live = store.pool.domains
    targets, writes = list(record.targets), {}
    for number in record.missing:
        if targets[number] not in live:
            other = replacement(record.number, targets, targets[number], live)
            if other is None:
                continue
            targets[number] = other
        writes[number] = (targets[number], shard.seal(stripe, number, bodies[number]))
    failed = store.pool.put(record.number, writes)
    done = [number for number in writes if number not in failed]
    if not done:
        return 0
    with store.lock:
        for number in done:
            record.targets[number] = targets[number]
        record.missing = [number for number in record.missing if number not in done]
        try:
            store.records.put([], [record.change()])
        except lmdb.Error:
            return 0
    return len(done)


def seal_short(store: ErasureStore, ends: Sequence[bytes]) -> int:
    """Join the short stripes of windows of 32 blocks that are complete by now. Returns how many were written."""
    sealed = 0
    for key in ends:
        entries = _window(store.index.get(key))
        if entries is None or len({entry.place.segment for entry in entries}) < 2:
            continue
        payloads = store.read([entry.key for entry in entries])
        whole = [payload for payload in payloads if payload is not None]
        if len(whole) < len(entries):
            continue
        first = entries[0]
        record = StripeRecord(secrets.randbits(64), first.generation, first.parent_key, first.depth, first.place.size,
                              [entry.key for entry in entries], [], [])  # fmt: skip
        if store_stripe(store, record, whole) is None:
            if store.move(entries, record):
                sealed += 1
            else:
                store.pool.delete(dict(enumerate(record.targets)), record.number)
    return sealed


def _window(last: Entry | None) -> list[Entry] | None:
    """The 32 blocks that end with this one, first to last."""
    entries: list[Entry] = []
    while last is not None and len(entries) < STRIPE_BLOCKS:
        entries.append(last)
        last = last.parent
    return entries[::-1] if len(entries) == STRIPE_BLOCKS else None


def scan(store: ErasureStore, now: float, age_s: float) -> tuple[int, int]:
    """Shards without a record, older than `age_s`, are removed; shards that are gone are noted for repair."""
    missing_count = stray_count = 0
    for name, target in store.pool.by_name.items():
        try:
            found = {(text.encode(), 0): written for text, written in target.names()}
        except OSError:
            continue
        expected = {(shard.name(r.number, n).encode(), 0): (r, n) for r in store.stripes
                    for n, place in enumerate(r.targets) if place == name and n not in r.missing}  # fmt: skip
        missing, stray = orphans(expected, found, now, age_s)
        for text in missing:
            record, number = expected[text, 0]
            record.missing = sorted([*record.missing, number])
            missing_count += 1
        for text, _ in stray:
            place = shard.parse_name(text.decode())
            if place is not None:
                store.pool.delete({place[1]: name}, place[0])
                stray_count += 1
    return missing_count, stray_count
