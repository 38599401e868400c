"""The store of cache blocks that all workers of a service share: any prefill worker hits any prefix.

A worker talks to the I/O process of its machine, which talks to the store. Rules: docs/kv_cache.md, One store for many
workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_core.check import require
from orchestrator.cache.block_object import HEADER_BYTES
from orchestrator.cache.client import CacheClient
from orchestrator.cache.layout import BlockLayout
from orchestrator.service.config import ServiceConfig, StoreSettings
from orchestrator.service.store.io_keeper import IoKeeper
from orchestrator.service.store.io_process import LINGER_S, Places

if TYPE_CHECKING:
    from orchestrator.engine.engine import Engine
    from orchestrator.engine.prefix_cache import PrefixCache
    from orchestrator.engine.prefix_tier import PrefixTier

START_S = 20.0
"""A worker waits so long for its I/O process when it starts, and begins without one then."""
_FLUSH_S = 10.0
_TURN_S = 4.0  # each machine's I/O process would walk a shared directory every 5 s; so one of them does


class SharedStore:
    """A worker's part of the store.

    Attributes:
        keeper: starts the I/O process of this machine where there is none.
    """

    def __init__(self, tier: PrefixTier, keeper: IoKeeper) -> None:
        self.tier, self.keeper = tier, keeper

    @property
    def alive(self) -> bool:
        """Is there an I/O process? It may hang all the same."""
        return self.tier.client.alive

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is stored or given up. False where the time was over before."""
        return self.tier.writer is None or self.tier.writer.flush(timeout_s)

    def numbers(self) -> dict[str, float]:
        """For `Hello.numbers`; asks nobody."""
        values = {"store_up": float(self.alive), "store_reconnects": float(self.keeper.reconnects)}
        if self.tier.writer is not None:
            values |= {f"store_{name}": float(count) for name, count in self.tier.writer.counts.items()}
        if self.tier.windows is not None:
            values |= {f"store_windows_{name}": float(count) for name, count in self.tier.windows.counts.items()}
        return values


@contextmanager
def shared_store(
    config: ServiceConfig, engine: Engine, model: Path, folder: Path, *, host: str = "127.0.0.1",
    deadline_s: float = 0.5, answer_s: float = 0.5, start_s: float = START_S, linger_s: float = LINGER_S,
) -> Iterator[SharedStore | None]:  # fmt: skip
    """Have an engine's prefix cache share blocks and windows with all workers. None where the config names no store.

    Before the engine's first request and before its handoffs are made, since keys get the model's name here. Without a
    store that can be reached the worker goes on; it tries again in a thread of its own.

    Args:
        model: folder of the checkpoint. folder: of the service on this machine.
        host: address of this machine, for stores of several machines.
        deadline_s, answer_s: a request waits so long for blocks, and for the answer what there is.
        linger_s: that the I/O process outlives the last worker.

    Raises:
        ValueError: for settings that cannot be.
    """
    check_store(config.store)
    prefix = engine.prefix
    if config.store.kind == "none" or prefix is None:
        yield None
        return
    from orchestrator.commands.prefix import name_model

    name_model(engine, model)
    layout, places = BlockLayout.of(engine.model.config, quantised=engine.cache.quantised), Places(folder)
    places.make()
    spec = {"folder": str(folder), "store": open_spec(config.store, host), "layout": layout.tag.hex(),
            "block_bytes": layout.block_bytes, "slots": config.store.host_blocks, "linger_s": linger_s}  # fmt: skip
    client = CacheClient(places.socket, places.arena, prefix.scope, answer_s)
    tier = share(prefix, client, layout.block_bytes, deadline_s)
    keeper = IoKeeper(client, places, spec)
    try:
        keeper.start(start_s)
        store = SharedStore(tier, keeper)
        yield store
        store.flush(_FLUSH_S if client.alive else 0.0)
    finally:
        keeper.close()
        tier.close()
        if prefix.pulls is not None:
            prefix.pulls.close()


def share(prefix: PrefixCache, client: CacheClient, block_bytes: int, deadline_s: float) -> PrefixTier:
    """Have a prefix cache whose model is named share blocks and windows through a client."""
    from orchestrator.engine.prefix_tier import PrefixTier
    from orchestrator.engine.store_writer import StoreWriter
    from orchestrator.engine.stored_windows import StoredWindows

    tier = PrefixTier(client, deadline_s)
    tier.writer = StoreWriter(client)
    rings = prefix.rings[:, 0]
    sealed = HEADER_BYTES + rings.numel() * rings.element_size()
    tier.windows = StoredWindows(client, tier.writer, prefix.windows.layout, sealed, block_bytes, deadline_s)
    prefix.ask([tier.windows], deadline_s)
    prefix.tier = tier
    return tier


def check_store(settings: StoreSettings) -> None:
    """Raises ValueError for settings with which no store can be opened."""
    if settings.kind in ("embedded", "directory"):
        require(bool(settings.folder), "store.folder", settings.folder, "a folder, which this kind of store needs")
    if settings.kind == "mooncake":
        require("master" in settings.options, "store.options", settings.options, '"master", HOST:PORT, among them')
    if settings.kind != "none":
        require(settings.capacity_gb > 0, "store.capacity_gb", settings.capacity_gb, "above 0")
        require(settings.host_blocks >= 8, "store.host_blocks", settings.host_blocks, "8 or more")


def open_spec(settings: StoreSettings, host: str) -> dict[str, Any]:
    """What `cache.store.open` takes. `capacity_gb` is in GiB; of a Mooncake Store it is one machine's share."""
    spec: dict[str, Any] = {"kind": settings.kind, "capacity": int(settings.capacity_gb * 2**30)}
    if settings.kind == "mooncake":
        return {**spec, "metadata": "P2PHANDSHAKE", "host": host, **settings.options}
    if settings.kind == "directory":
        spec["turn_s"] = _TURN_S
    return {**spec, "folder": settings.folder, **settings.options}
