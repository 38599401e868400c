"""What stands behind the device pool: blocks come from the host tier and the store, and full ones go there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from orchestrator.cache.chain import Chain, ImageRun
from orchestrator.cache.client import CacheClient, Plan
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.retention import Retention
from orchestrator.cache.windows import WindowKey
from orchestrator.engine.block_loads import BlockLoads
from orchestrator.engine.store_writer import Job, StoreWriter

if TYPE_CHECKING:
    from orchestrator.cache.handles import FetchHandle
    from orchestrator.cache.host.arena import HostArena
    from orchestrator.engine.request import SamplingParams
    from orchestrator.engine.shared_blocks import SharedBlocks
    from orchestrator.engine.stored_windows import StoredWindows
    from orchestrator.model.cache import CachePools

_log = logging.getLogger(__name__)


class PrefixTier:
    """One engine's use of a `CacheClient`, whose scope has to be that of the engine's `PrefixCache`.

    Only the engine's thread calls it.

    Attributes:
        deadline_s: a request waits so long for its blocks at most, and goes on with those that have come.
        loads: what brings fetched blocks into the pools, from the first on.
        writer: hands full blocks on from a thread of its own; without one the engine's thread waits for room.
        windows: snapshots are stored too, and had from there; needs a writer.
    """

    def __init__(self, client: CacheClient, deadline_s: float = 0.5) -> None:
        self.client, self.deadline_s = client, deadline_s
        self.loads: BlockLoads | None = None
        self.writer: StoreWriter | None = None
        self.windows: StoredWindows | None = None
        self._unloadable: HostArena | None = None
        self._stream: torch.cuda.Stream | None = None

    def match(self, tokens: list[int], root: bytes, images: Sequence[ImageRun] = ()) -> Plan:
        """A prompt's chain and how many of its first blocks the tiers have."""
        return self.client.match(tokens, images, root=root)

    def fetch(self, plan: Plan, first: int, on_done: Callable[[], None]) -> FetchHandle:
        """Start bringing the plan's blocks from `first` on into host memory; `on_done` as in `CacheClient.fetch`."""
        return self.client.fetch(plan, self.deadline_s, first=first, on_done=lambda handle: on_done())

    def absorb(self, handle: FetchHandle, first: int, chain: Chain, blocks: SharedBlocks, cache: CachePools) -> int:
        """Copy what has come into the device pool, where it counts as cached. Returns how many blocks."""
        new = list[int]()
        before = blocks.match(chain.keys[:first])
        if len(before) == first:  # else they were evicted meanwhile, and nothing would lead here
            blocks.hold(before)
            taken = blocks.take(min(handle.blocks, blocks.free))
            good = self._bring(handle, taken, cache)
            blocks.give(taken[good:])
            new = [blocks.publish(block, chain.keys[first + n]) for n, block in enumerate(taken[:good])]
            blocks.give([*before, *new])
        handle.release()
        return len(new)

    def _bring(self, handle: FetchHandle, taken: list[int], cache: CachePools) -> int:
        """Have blocks hold what was fetched; returns how many of the first do. Slots stay until `release`."""
        loads = self._loads_of(self.client.arena, cache)
        if loads is not None:
            return loads.load(handle.slots[: len(taken)], handle.keys[: len(taken)], taken)
        payloads = []
        for number in range(len(taken)):
            payload = handle.payload(number)
            if payload is None:
                break
            payloads.append(payload)
        layout = BlockLayout.of(cache.config, quantised=cache.quantised)
        layout.scatter(cache, taken[: len(payloads)], payloads)
        return len(payloads)

    def _loads_of(self, arena: HostArena | None, cache: CachePools) -> BlockLoads | None:
        """What loads from this arena; None where gdr_swapin cannot, which is said once."""
        if arena is None or arena is self._unloadable:
            return None
        if self.loads is None or self.loads.source is not arena:
            if self.loads is not None:
                self.loads.close()
                self.loads = None
            try:
                self.loads = BlockLoads(arena, cache)
            except (ValueError, OSError, RuntimeError, ImportError) as error:
                self._unloadable = arena
                _log.warning("blocks are copied one by one, as gdr_swapin cannot load them: %s", error)
        return self.loads

    def close(self) -> None:
        """End the client, what waits to be written, and what loads from its arena."""
        if self.writer is not None:
            self.writer.close()
        if self.loads is not None:
            self.loads.close()
            self.loads = None
        self.client.close()

    def used(self, chain: Chain, blocks: int, params: SamplingParams) -> None:
        """A hit of so many blocks was adopted by a request with `params`, whose class says how long they stay."""
        self.client.use(Plan(chain, blocks), blocks, _retention(params))

    def store(
        self, chain: Chain, first: int, blocks: list[int], cache: CachePools, params: SamplingParams, *, settled: bool
    ) -> None:
        """Hand blocks `first` and on of a chain to the store; they are copied before this returns.

        Class and tenant are those of the request with `params` that filled them. `settled` says that the host has
        waited for the steps that wrote them, so that a GPU's copy need not wait for those that are under way.
        """
        layout = BlockLayout.of(cache.config, quantised=cache.quantised)
        with self._beside(cache) if settled else nullcontext():
            payloads = layout.gather(cache, blocks)
        if self.writer is None:
            self.client.insert(chain, first, payloads, _retention(params), params.cache_salt)
            return
        keys = list(chain.keys[: first + len(payloads)])
        self.writer.put(Job(chain.root, keys, first, payloads, _retention(params), params.cache_salt))

    def share(self, key: WindowKey, sealed: bytes, params: SamplingParams) -> None:
        """Have a snapshot of a request with `params` stored, if snapshots are."""
        if self.windows is not None:
            self.windows.put(key, sealed, _retention(params), params.cache_salt)

    def _beside(self, cache: CachePools) -> AbstractContextManager[object]:
        """Copies overtake the steps in flight; without meaning on a CPU."""
        if not cache.rings.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(cache.rings.device)
        return torch.cuda.stream(self._stream)


def _retention(params: SamplingParams) -> Retention:
    return Retention[params.cache_class.upper()]
