"""Several clients of one Mooncake Store: a key counts only once it can be read."""

from __future__ import annotations

from test_many_writers import LAYOUT, chain, payload

from orchestrator.cache.store.base import Put


def test_what_another_client_has_only_begun_is_not_stored(master) -> None:
    """Mooncake's own `put` says that all is well then, and nothing can be read."""
    from orchestrator.cache.store.mooncake import MooncakeStore, connect

    address, sizes = str(master.options["master"]), {"segment_bytes": 32 << 20, "buffer_bytes": 16 << 20}
    clients = [connect(address, "P2PHANDSHAKE", **sizes) for _ in range(2)]
    stores = [MooncakeStore(client, LAYOUT, 1 << 24) for client in clients]
    try:
        half, whole = chain(1, 2), chain(2, 3)
        name = stores[0]._name(half[0].key)
        assert clients[0].batch_put_session_start([name], [4096 + 128]) == [0]
        assert stores[1].write(half, 0.0) == [Put.FAILED, Put.NO_PARENT]
        assert stores[1].present([half[0].key]) == [False] and stores[1].read([half[0].key]) == [None]
        assert stores[0].write(whole, 0.0) == [Put.STORED] * 3 and stores[1].write(whole, 0.0) == [Put.ALREADY] * 3
        assert stores[1].read([block.key for block in whole]) == [payload(block.key) for block in whole]
    finally:
        for store in stores:
            store.close()
