"""A ring of bytes in memory that two processes share: one writes, the other reads."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from orchestrator.transfer.errors import LinkBroken
from orchestrator.transfer.tcp import wait_for

HEAD_BYTES = 128  # two counters on cache lines of their own
_LOOK = 0.05  # seconds after which who waits looks again, whatever it was told


class Ring:
    """`memory` is two counters, of bytes written and of bytes read in all, and the bytes. Neither ever goes back.

    A counter is written as one aligned word after the bytes that it speaks of, and a socket call follows. What came
    has its checksum on top of it, so a reader that saw the counter first would ask again.
    """

    def __init__(self, memory: memoryview, bell: socket.socket) -> None:
        bell.setblocking(False)
        self._bell, self._using = bell, threading.Lock()
        self._counts, self._bytes = memory[:HEAD_BYTES].cast("Q"), memory[HEAD_BYTES:]
        self._size = len(self._bytes)
        memory.release()

    def write(self, view: memoryview, timeout: float) -> int:
        return self._move(view, timeout, writes=True)

    def read_into(self, view: memoryview, timeout: float) -> int:
        return self._move(view, timeout, writes=False)

    def _move(self, view: memoryview, timeout: float, *, writes: bool) -> int:
        until = time.monotonic() + timeout
        ended = False
        while True:
            with self._using:
                done = self._copy(view, writes=writes)
            if done:
                self._ring()
                return done
            if ended:
                raise LinkBroken("the other side has closed the link")
            left = until - time.monotonic()
            if left <= 0:
                return 0
            if wait_for(self._bell, select.POLLIN, min(left, _LOOK)):
                ended = self._listen()  # then look once more: its last bytes count
                if ended and writes:
                    raise LinkBroken("the other side has closed the link")

    def _copy(self, view: memoryview, *, writes: bool) -> int:
        if self._bell.fileno() < 0:
            raise LinkBroken("the link is closed")
        written, read = self._counts[0], self._counts[8]
        if not 0 <= written - read <= self._size:
            raise LinkBroken(f"ring: got {written} bytes written and {read} read, of {self._size}", "message")
        there = self._size - (written - read) if writes else written - read
        at = (written if writes else read) % self._size
        count = min(len(view), there, self._size - at)
        if not count:
            return 0
        if writes:
            self._bytes[at : at + count] = view[:count]
            self._counts[0] = written + count
        else:
            view[:count] = self._bytes[at : at + count]
            self._counts[8] = read + count
        return count

    def _ring(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # full of bells already, or the other side has ended: seen when it is waited for
            self._bell.send(b"!", socket.MSG_NOSIGNAL)

    def _listen(self) -> bool:
        """Whether the other side has ended."""
        try:
            return not self._bell.recv(4096)
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkBroken(f"socket: {error}") from None

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop()
        with self._using:
            self._bell.close()
            self._counts.release()
            self._bytes.release()
