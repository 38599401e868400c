"""What requests of a trace share with earlier ones, and how long ago that was last used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel_core.check import require
from orchestrator.cache.chain import usable_blocks
from orchestrator.model.config import BLOCK_TOKENS


@dataclass(frozen=True)
class Shared:
    """What a request finds of its prompt, by how long blocks are kept.

    Attributes:
        blocks: int64, ascending numbers of blocks of 128 tokens from the prompt's start.
        ages: float64 seconds, ascending: the first `blocks[i]` were all used within the last `ages[i]`. A use of a path
            is a use of every block on it, so a deeper block is never younger.
    """

    blocks: np.ndarray
    ages: np.ndarray

    def hit(self, life: float) -> int:
        """Tokens found where blocks stay for `life` seconds after a use; infinity keeps them for good."""
        at = int(np.searchsorted(self.ages, life, side="right"))
        return int(self.blocks[at - 1]) * BLOCK_TOKENS if at else 0


@dataclass(frozen=True)
class Gaps:
    """Seconds between one use of a block and the next over a whole trace; infinite for a block's first use.

    Attributes:
        seconds: float64, ascending. tokens: int64, tokens of the blocks with that gap.
    """

    seconds: np.ndarray
    tokens: np.ndarray

    def held(self, life: float) -> float:
        """Token-seconds in the store over the trace. A use keeps a block until the next one, `life` seconds at most.

        A block's last use keeps it for `life`: that is what its first use, with an infinite gap, is counted as.
        """
        return float(np.minimum(self.seconds, life) @ self.tokens)

    def written(self, life: float) -> float:
        """Tokens written over the trace: blocks never seen before, or gone by then."""
        return float(self.tokens[self.seconds > life].sum())


class Tracker:
    """When each block of a trace was last used.

    Args:
        size: tokens of a block as recorded. Hits are whole blocks of 128 all the same, as our cache has them.
    """

    def __init__(self, size: int) -> None:
        require(
            size > 0 and (size % BLOCK_TOKENS == 0 or BLOCK_TOKENS % size == 0),
            "size", size, f"a multiple or divisor of {BLOCK_TOKENS}",
        )  # fmt: skip
        self.size = size
        self._last = np.empty(0)
        self.shared: list[Shared] = []
        self._gaps: list[np.ndarray] = []

    def fresh(self, count: int) -> np.ndarray:
        """int64 ids that no block has had."""
        first = len(self._last)
        self.upto(first + count)
        return np.arange(first, first + count)

    def upto(self, count: int) -> None:
        """Know ids below `count`; new ones were never used."""
        if count > len(self._last):
            self._last = np.concatenate([self._last, np.full(count - len(self._last), -np.inf)])

    def note(self, time: float, tokens: int, ids: np.ndarray) -> None:
        """A prompt of `tokens` tokens with these blocks, from its first, came at `time` and used all of them."""
        ages = time - self._last[ids]
        self._gaps.append(ages)
        never = np.flatnonzero(np.isinf(ages))
        known = int(never[0]) if len(never) else len(ages)
        usable = usable_blocks(tokens) if tokens > 0 else 0
        whole = np.minimum((np.arange(known) + 1) * self.size // BLOCK_TOKENS, usable)
        self.shared.append(_steps(whole, np.maximum.accumulate(ages[:known])))
        self._last[ids] = time

    def gaps(self) -> Gaps:
        """Of all uses so far."""
        seconds, counts = np.unique(np.concatenate([np.empty(0), *self._gaps]), return_counts=True)
        return Gaps(seconds, counts * self.size)


def together(gaps: Sequence[Gaps]) -> Gaps:
    """Gaps of several traces as those of one."""
    seconds, inverse = np.unique(np.concatenate([g.seconds for g in gaps]), return_inverse=True)
    tokens = np.bincount(inverse, np.concatenate([g.tokens for g in gaps]), len(seconds))
    return Gaps(seconds, tokens.astype(np.int64))


def _steps(blocks: np.ndarray, ages: np.ndarray) -> Shared:
    """The last count of each age only: a path has few ages and many blocks."""
    if not len(ages) or not blocks[-1]:
        return Shared(np.empty(0, np.int64), np.empty(0))
    last = np.append(np.flatnonzero(np.diff(ages) > 0), len(ages) - 1)
    return Shared(blocks[last].astype(np.int64), ages[last])
