"""Transfers under way over shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ep_comm.errors import Broken, CommError, Mismatch, PeerTimeout
from ep_comm.results import Transfer

_SLICE = 0.1  # seconds after which a wait looks at signals
_LATER, _MISMATCH = 1, 3


class MemoryMoving:
    """What one `move` started; its buffers stay alive until their transfers have ended.

    A failure of one transfer is raised by every later call; the others go on.
    """

    def __init__(self, end: Any, rank: int, timeout: float, epoch: Callable[[], int]) -> None:
        self._end, self._rank, self._timeout, self._epoch = end, rank, timeout, epoch
        self._pending: dict[int, Transfer] = {}
        self._error: CommError | None = None

    def start(self, transfers: Sequence[Transfer]) -> None:
        for t in transfers:
            number = self._end.start_transfer(t.tag, t.source, t.target, t.buffer.data_ptr(), t.buffer.numel())
            self._pending[number] = t

    def pending(self) -> list[Transfer]:
        """Those that have not ended."""
        for number in list(self._pending):
            verdict = self._end.transfer_state(number)
            if verdict.code == _LATER:
                continue
            self._end.forget_transfer(number)
            del self._pending[number]
            if verdict.code:
                failure = Mismatch if verdict.code == _MISMATCH else Broken
                self._error = self._error or failure(verdict.text)
        return list(self._pending.values())

    def done(self) -> bool:
        left = self.pending()
        if self._error is not None:
            raise self._error
        return not left

    def wait(self, timeout: float | None = None) -> None:
        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up(seconds)
                return
            self._end.wait_transfer(next(iter(self._pending)), min(left, _SLICE))

    def _give_up(self, seconds: float) -> None:
        peers = set()
        for number, t in list(self._pending.items()):
            self._end.forget_transfer(number)
            peers.add(t.target if t.source == self._rank else t.source)
        self._pending.clear()
        self._error = PeerTimeout(self._rank, tuple(sorted(peers)), "move", self._epoch(), seconds)
        raise self._error
