"""A prefill step over the ranks of an expert-parallel group: equal attention time for all, a common limit on tokens.

All ranks meet at every expert layer, so the slowest rank's attention is everybody's. Each rank fills its step first in
first out up to the same quota; the request that would pass it is cut by the inverse of the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_core.check import require
from orchestrator.balance.prefill.cost import Chunk, PrefillCost


@dataclass(frozen=True)
class Waiting:
    """A prompt at an engine: `computed` tokens are in the cache (cached ones too), `remaining` are not."""

    request: str
    computed: int
    remaining: int


@dataclass(frozen=True)
class Quota:
    """Attributes:
    least, most: bounds of a step, seconds.
    tokens: most tokens of a step over all ranks, for the expert layers.
    """

    least: float = 0.05
    most: float = 0.3
    tokens: int = 1 << 20

    def __post_init__(self) -> None:
        require(0 < self.least <= self.most, "least", self.least, f"above 0, to {self.most}")
        require(self.tokens > 0, "tokens", self.tokens, "1 or more")


def agree(cost: PrefillCost, queues: Sequence[Sequence[Waiting]], quota: Quota) -> float:
    """Seconds of the coming step, the same for all ranks: what the largest oldest request needs, within bounds."""
    needs = [cost.launch + cost.prompt(q[0].remaining, q[0].computed) for q in queues if q]
    return min(max([quota.least, *needs]), quota.most)


def fill(
    cost: PrefillCost, queue: Sequence[Waiting], seconds: float, tokens: int | None = None
) -> list[tuple[str, Chunk]]:
    """Chunks of one rank's step within `seconds`, first in first out, at most `tokens` tokens.

    Only the last request is cut. The oldest gets a block even where `seconds` is too short for it, or it would wait
    for ever.
    """
    left = seconds - cost.launch
    room = tokens
    taken: list[tuple[str, Chunk]] = []
    for waiting in queue:
        if room is not None and room <= 0:
            break
        count = cost.largest(left, waiting.computed, waiting.remaining, room)
        if count == 0 and not taken:
            count = min(waiting.remaining, 128 - waiting.computed % 128)
            count = count if room is None else min(count, room)
        if count == 0:
            break
        chunk = Chunk(count, waiting.computed, final=count == waiting.remaining)
        taken.append((waiting.request, chunk))
        left -= cost.chunk(chunk)
        room = None if room is None else room - count
        if not chunk.final:
            break
    return taken


def plan(
    cost: PrefillCost, queues: Sequence[Sequence[Waiting]], quota: Quota
) -> tuple[float, list[list[tuple[str, Chunk]]]]:
    """The group's step: its seconds and each rank's chunks. Ranks without work get none and take part all the same.

    Tokens beyond the common limit are taken from the ranks that have most, each rank keeping its first blocks.
    """
    seconds = agree(cost, queues, quota)
    steps = [fill(cost, queue, seconds) for queue in queues]
    totals = [sum(c.tokens for _, c in step) for step in steps]
    if sum(totals) <= quota.tokens:
        return seconds, steps
    level = _level(totals, quota.tokens)
    steps = [
        step if total <= level else fill(cost, queue, seconds, level)
        for queue, step, total in zip(queues, steps, totals, strict=True)
    ]
    return seconds, steps


def _level(totals: Sequence[int], limit: int) -> int:
    """The largest cap a rank for which the sum is within the limit."""
    left = limit
    for done, total in enumerate(sorted(totals)):
        level = left // (len(totals) - done)
        if total > level:
            return max(1, level)
        left -= total
    return max(totals)
