"""Paged memory of a toy engine: the real block pool, and a few bytes a row. What is given out new is full of poison."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cache.pool import BlockPool
from orchestrator.model.config import BLOCK_TOKENS
from orchestrator.simulate.toy.model import ROW

BLOCK_BYTES = BLOCK_TOKENS * ROW
_POISON = b"\xde\xad\xbe\xef" * BLOCK_TOKENS


class Cells:
    """Rows in blocks of 128 tokens.

    Args:
        blocks: that can be given out.
    """

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks + 1)
        self._rows: dict[int, bytearray] = {}
        self._launched = 0

    def need(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // BLOCK_TOKENS)

    def take(self, count: int) -> list[int]:
        """Raises `PoolFull` where fewer are free or cached; nothing is taken then."""
        ids = self.pool.take(count)
        for block in ids:
            self._rows[block] = bytearray(_POISON)
        return ids

    def launched(self) -> int:
        """A step begins that may touch what is live; what is given up meanwhile comes free when it is `completed`."""
        self._launched = self.pool.launched()
        return self._launched

    def quiet(self) -> None:
        """No step is under way any more, however it ended."""
        self.pool.completed(self._launched)

    def write(self, blocks: Sequence[int], position: int, rows: bytes) -> None:
        """Rows of tokens from `position` on; `blocks` is the whole sequence's table."""
        at, end = position * ROW, position * ROW + len(rows)
        done = 0
        while at < end:
            block, offset = divmod(at, BLOCK_BYTES)
            count = min(BLOCK_BYTES - offset, end - at)
            self._rows[blocks[block]][offset : offset + count] = rows[done : done + count]
            at, done = at + count, done + count

    def read(self, blocks: Sequence[int], tokens: int) -> bytes:
        """The first `tokens` rows of a table, whatever lies there."""
        rows = self._rows
        return b"".join([rows[block] for block in blocks])[: tokens * ROW]

    def block(self, block: int) -> bytes:
        """One block's bytes."""
        return bytes(self._rows[block])

    @property
    def adds_up(self) -> bool:
        """Whether free, live, fenced and cached blocks are all there are."""
        return sum(self.pool.counts.values()) == self.pool.size - 1
