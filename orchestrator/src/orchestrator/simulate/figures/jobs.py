"""What the simulated service keeps of a request, and when what happened to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from orchestrator.balance.prefill import Chunk, PrefillCost
from orchestrator.cache.chain import usable_blocks
from orchestrator.model.config import BLOCK_TOKENS


class At(IntEnum):
    """Points in a request's life, in order: columns of `Record.times`."""

    ARRIVED = 0
    QUEUED = 1
    PULLED = 2
    FETCHED = 3
    READY = 4
    STARTED = 5
    PREFILLED = 6
    MOVED = 7
    FIRST = 8
    DONE = 9


SPLIT = ("match", "queue", "fetch", "swap-in", "wait", "prefill", "transfer", "first decode")
"""Names of the seconds between the points up to FIRST."""


@dataclass(slots=True)
class Job:
    """A prompt in prefill.

    Attributes:
        number: of its row in the record. length: tokens of the prompt. computed: tokens in the cache by now; remaining:
            those that are not. hit: tokens read from the store.
        cost: seconds on one rank that are left, apart from launches. order: what queues sort by.
        rank: of its group, once bound to one; -1 before. ready: when its prefix is there.
    """

    number: int
    length: int
    hit: int
    computed: int
    remaining: int
    cost: float
    order: float = 0.0
    rank: int = -1
    ready: float = 0.0
    started: bool = False

    @classmethod
    def of(cls, number: int, length: int, hit: int, cost: PrefillCost) -> Job:
        """With the window of 128 tokens before the end of a hit computed again; a hit of no more than that is none."""
        hit = min(hit, usable_blocks(length) * BLOCK_TOKENS)
        hit = hit if hit > BLOCK_TOKENS else 0
        computed = max(0, hit - BLOCK_TOKENS)
        return cls(number, length, hit, computed, length - computed, cost.prompt(length - computed, computed))

    def advance(self, chunk: Chunk, cost: PrefillCost) -> None:
        """A step has computed `chunk` of it."""
        self.computed += chunk.tokens
        self.remaining -= chunk.tokens
        self.cost = cost.prompt(self.remaining, self.computed) if self.remaining else 0.0


@dataclass
class Record:
    """What happened.

    Attributes:
        times: float64 [requests, 10], by `At`; NaN for what never happened.
        outputs: int64, tokens given out. refused: bool, turned away at the door. accepted: the others.
        steps: of prefill, (begin, seconds, seconds of the ranks' own work in sum, ranks).
        turns: of decode, (begin, seconds, seconds were all ranks alike, sequences).
        reads_by_decode: prefixes read by the decode side's card. link_use: busiest card's busy seconds, by kind.
    """

    times: np.ndarray
    outputs: np.ndarray
    refused: np.ndarray
    steps: list[tuple[float, float, float, int]] = field(default_factory=list)
    turns: list[tuple[float, float, float, int]] = field(default_factory=list)
    computed: int = 0
    reads_by_decode: int = 0
    link_use: dict[str, float] = field(default_factory=dict)

    @classmethod
    def empty(cls, requests: int) -> Record:
        return cls(np.full((requests, len(At)), np.nan), np.zeros(requests, np.int64), np.zeros(requests, bool))
