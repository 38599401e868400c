"""Building the index from records after a start."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.cache.index import BlockIndex, Publish
from orchestrator.cache.store.records import Records
from orchestrator.cache.store.segments import Place


def restore(index: BlockIndex, records: Records, adopt: Callable[[bytes, Place], bool]) -> list[bytes]:
    """Publish what is recorded, parents first. `adopt` says whether the bytes of a record are there, and counts them.

    Returns keys of records that cannot be: their bytes are not there, or a block before them is missing.
    """
    dropped = []
    for key, record in sorted(records, key=lambda pair: pair[1].depth):
        root = b"" if record.depth else record.parent
        above = index.get(record.parent)
        whole = record.depth == 0 or (above is not None and above.depth + 1 == record.depth)
        if not whole or not adopt(key, record.place):
            dropped.append(key)
            continue
        done = index.publish(key, record.parent, record.place.size, record.atime, root=root, tenant=record.tenant,
                      place=record.place, generation=record.generation, expiry=record.expiry)  # fmt: skip
        assert done is Publish.NEW
    return dropped + records.unreadable
