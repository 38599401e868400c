"""Writing stripes: how blocks are packed, and when enough shards are durable."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.cache.erasure import code, shard
from orchestrator.cache.erasure.placement import place
from orchestrator.cache.erasure.shard import STRIPE_BLOCKS
from orchestrator.cache.erasure.stripes import StripeRecord
from orchestrator.cache.store.base import Block, Put

if TYPE_CHECKING:
    from orchestrator.cache.erasure.store import ErasureStore

MIN_SHARDS = code.SHARDS - 1


def runs(blocks: Sequence[Block]) -> list[list[tuple[int, Block]]]:
    """Blocks that follow each other in a chain, cut where a stripe is full."""
    found: list[list[tuple[int, Block]]] = []
    for number, block in enumerate(blocks):
        last = found[-1][-1][1] if found else None
        follows = last is not None and block.parent == last.key and block.depth == last.depth + 1
        same = last is not None and block.tenant == last.tenant and len(block.payload) == len(last.payload)
        if follows and same and block.depth % STRIPE_BLOCKS:
            found[-1].append((number, block))
        else:
            found.append([(number, block)])
    return found


def write_run(store: ErasureStore, run: Sequence[tuple[int, Block]], results: dict[int, Put], now: float) -> None:
    """Store what is new of a run as one stripe; `results` gets an entry for each of its blocks."""
    fresh: list[tuple[int, Block]] = []
    with store.lock:
        for number, block in run:
            if store.index.get(block.key) is not None:
                results[number] = Put.ALREADY
            elif fresh or not block.depth or store.index.get(block.parent) is not None:
                fresh.append((number, block))
            else:
                results[number] = Put.NO_PARENT
        if not fresh:
            return
        first = fresh[0][1]
        record = StripeRecord(secrets.randbits(64), store.index.next_generation(), first.parent, first.depth,
                              len(first.payload), [b.key for _, b in fresh], [], [])  # fmt: skip
    failure = store_stripe(store, record, [block.payload for _, block in fresh])
    if failure is None:
        failure = store.publish(record, [block for _, block in fresh], now)
    results.update(dict.fromkeys((number for number, _ in fresh), failure or Put.STORED))


def store_stripe(store: ErasureStore, record: StripeRecord, payloads: Sequence[bytes]) -> Put | None:
    """Write the shards of a new stripe. None if eleven or more are durable; `missing` says which is not."""
    stripe = record.stripe(store.layout)
    if store.stripes.used + record.stored_bytes > store.capacity:
        return Put.FULL
    try:
        record.targets = place(record.number, store.pool.domains)
    except ValueError:  # too few live targets: a dead one is among the twelve and stays out
        record.targets = place(record.number, {n: t.domain for n, t in store.pool.by_name.items()})
    bodies = code.encode(b"".join(payloads))
    store.at("shards.put")
    writes = {n: (record.targets[n], shard.seal(stripe, n, body)) for n, body in enumerate(bodies)}
    failed = store.pool.put(record.number, writes)
    store.at("shards.done")
    record.missing = sorted(failed)
    if code.SHARDS - len(failed) >= MIN_SHARDS:
        return None
    store.pool.delete({n: record.targets[n] for n in range(code.SHARDS) if n not in failed}, record.number)
    full = any(error.errno in (errno.ENOSPC, errno.EDQUOT) for error in failed.values())
    return Put.FULL if full else Put.FAILED
