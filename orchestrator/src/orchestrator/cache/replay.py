"""A trace through the real index and collector, without bytes: what would have been a hit."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.cache.chain import usable_blocks
from orchestrator.cache.gc import Collector, Tick, Unpublish
from orchestrator.cache.index import BlockIndex, Publish
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.traces import TraceRequest
from orchestrator.model.config import BLOCK_TOKENS


@dataclass
class Outcome:
    """Sums over a replay; `tokens` and `hits` by class, in tokens, `refused` in prompts."""

    requests: int = 0
    tokens: Counter[Retention] = field(default_factory=Counter)
    hits: Counter[Retention] = field(default_factory=Counter)
    published: int = 0
    looked_up: int = 0
    refused: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    most_blocks: int = 0
    seconds: float = 0.0

    def rate(self, retention: Retention | None = None) -> float:
        """Share of prompt tokens that were hits."""
        if retention is None:
            return self.hits.total() / max(1, self.tokens.total())
        return self.hits[retention] / max(1, self.tokens[retention])


def replay(
    requests: Iterable[TraceRequest],
    block_bytes: int,
    capacity: int | None = None,
    policy: RetentionPolicy | None = None,
) -> Outcome:
    """Each request is matched, its hit used, its missing blocks published; the collector has a turn before and after.

    What does not fit before the collector's next turn is refused, with all that follows it in its prompt.
    Prompts only: a request's output counts once it comes back as part of a later prompt. `capacity` is in bytes, None
    is without bound.
    """
    index = BlockIndex(policy)
    bound = capacity or 1 << 62
    collector = Collector(index, bound)
    outcome = Outcome()
    collecting = gc.isenabled()
    gc.disable()  # millions of live objects; what is dead goes at the end
    started = time.perf_counter()
    root = b""
    for request in requests:
        keys, now, retention = request.keys, request.time, request.retention
        _collect(collector, now, outcome)
        usable = keys[: usable_blocks(request.tokens)]
        hit = index.match(usable)
        outcome.requests += 1
        outcome.looked_up += len(usable)
        outcome.tokens[retention] += request.tokens
        outcome.hits[retention] += hit * BLOCK_TOKENS
        parent = keys[hit - 1] if hit else root
        index.use(keys[:hit], now, retention)
        for key in keys[hit:]:
            if index.used + block_bytes > bound and key not in index:
                outcome.refused += 1
                break  # as a store that is full: what follows would have no parent
            done = index.publish(key, parent, block_bytes, now, retention, root=root)
            outcome.published += done is Publish.NEW
            parent = key
        index.use(keys, now, retention)
        outcome.most_blocks = max(outcome.most_blocks, len(index))
        _collect(collector, now, outcome)
    outcome.seconds = time.perf_counter() - started
    del collector, index
    gc.collect()
    if collecting:
        gc.enable()
    return outcome


def _collect(collector: Collector, now: float, outcome: Outcome) -> None:
    for action in collector.step(Tick(), now):
        if isinstance(action, Unpublish):
            outcome.removed[action.why] += len(action.entries)
