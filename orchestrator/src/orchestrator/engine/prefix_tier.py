"""What stands behind the device pool: blocks come from the host tier and the store, and full ones go there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from orchestrator.cache.chain import Chain
from orchestrator.cache.client import CacheClient, Plan
from orchestrator.cache.layout import BlockLayout
from orchestrator.cache.retention import Retention

if TYPE_CHECKING:
    from orchestrator.cache.handles import FetchHandle
    from orchestrator.engine.shared_blocks import SharedBlocks
    from orchestrator.model.cache import CachePools


class PrefixTier:
    """One engine's use of a `CacheClient`, whose scope has to be that of the engine's `PrefixCache`.

    Only the engine's thread calls it; `arrived` is set from any thread when a fetch has ended.

    Attributes:
        deadline_s: a request waits so long for its blocks at most, and goes on with those that have come.
    """

    def __init__(self, client: CacheClient, deadline_s: float = 0.5, retention: Retention = Retention.CHAT) -> None:
        self.client, self.deadline_s, self.retention = client, deadline_s, retention
        self.arrived = threading.Event()

    def match(self, tokens: list[int], root: bytes) -> Plan:
        """A prompt's chain and how many of its first blocks the tiers have."""
        return self.client.match(tokens, root=root)

    def fetch(self, plan: Plan, first: int) -> FetchHandle:
        """Start bringing the plan's blocks from `first` on into host memory."""
        return self.client.fetch(plan, self.deadline_s, first=first, on_done=lambda handle: self.arrived.set())

    def absorb(self, handle: FetchHandle, first: int, chain: Chain, blocks: SharedBlocks, cache: CachePools) -> int:
        """Copy what has come into the device pool, where it counts as cached. Returns how many blocks."""
        layout, new = BlockLayout.of(cache.config, quantised=cache.quantised), list[int]()
        before = blocks.match(chain.keys[:first])
        if len(before) == first:  # else they were evicted meanwhile, and nothing would lead here
            blocks.hold(before)
            for number in range(min(handle.blocks, blocks.free)):
                payload = handle.payload(number)
                if payload is None:
                    break
                block = blocks.take(1)[0]
                layout.scatter(cache, block, payload)
                new.append(blocks.publish(block, chain.keys[first + number]))
            blocks.give([*before, *new])
        handle.release()
        return len(new)

    def used(self, chain: Chain, blocks: int) -> None:
        """A hit of so many blocks was adopted."""
        self.client.use(Plan(chain, blocks), blocks, self.retention)

    def store(self, chain: Chain, first: int, blocks: list[int], cache: CachePools) -> None:
        """Hand blocks `first` and on of a chain to the store; they are copied before this returns."""
        layout = BlockLayout.of(cache.config, quantised=cache.quantised)
        self.client.insert(chain, first, [layout.gather(cache, block) for block in blocks], self.retention)
