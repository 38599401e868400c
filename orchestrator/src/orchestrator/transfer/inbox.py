"""Parts at the receiver that its owner has not taken, and how the transfer ended there."""

from __future__ import annotations

import threading
import time
from collections import deque

import google_crc32c

from orchestrator.transfer import frames
from orchestrator.transfer.errors import LinkBroken, TransferFailed
from orchestrator.transfer.settings import NAME_BYTES, Limits


class Inbox:
    """Everything under one lock, `changed`.

    Attributes:
        next: parts that came whole. taken: parts that the owner has.
        end: number of all parts, once that is known.
        failed: why no more will come. concluded: the sender has answered the verdict.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self.changed = limits, threading.Condition()
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._bytes = self._total = 0
        self.next = self.taken = 0
        self.end: int | None = None
        self.failed: TransferFailed | None = None
        self.concluded = False

    @property
    def waiting(self) -> int:
        """Bytes that the owner has not taken."""
        return self._bytes

    def room(self) -> int:
        """The largest part that may come now."""
        with self.changed:
            free = self._limits.part if not self._waiting else max(0, self._limits.window - self._bytes)
            return min(free, self._limits.part, self._limits.total - self._total)

    def add(self, piece: frames.Piece, payload: bytes | bytearray) -> None:
        """Raises LinkBroken unless it is the next part, whole and of the bytes that were sent. Nothing is changed."""
        with self.changed:
            if piece.number != self.next or self.end is not None:
                raise LinkBroken(f"part: got number {piece.number}, allowed is {self.next}, the next", "message")
            if len(piece.name.encode()) > NAME_BYTES or piece.number >= self._limits.parts:
                got = f"part {piece.number} with a name of {len(piece.name)} characters"
                allowed = f"{self._limits.parts} parts with names of {NAME_BYTES} bytes"
                raise LinkBroken(f"part: got {got}, allowed are {allowed}", "size")
            data = bytes(payload)
            if google_crc32c.value(data) != piece.crc:
                raise LinkBroken(f"part {piece.name!r}: its bytes differ from those of its checksum", "checksum")
            self._waiting.append((piece.name, data))
            self._bytes, self._total = self._bytes + len(data), self._total + len(data)
            self.next += 1
            self.changed.notify_all()

    def close(self, count: int) -> None:
        """There are `count` parts. Raises LinkBroken unless they have come."""
        with self.changed:
            if count != self.next:
                raise LinkBroken(f"end: got {count} parts, {self.next} have come", "message")
            self.end = count
            self.changed.notify_all()

    def take(self, timeout: float) -> tuple[str, bytes] | None:
        """The next part, once; None behind the last. Parts that came whole are given before a failure is told.

        Raises TimeoutError; TransferFailed.
        """
        until = time.monotonic() + timeout
        with self.changed:
            while not self._waiting:
                if self.end is not None and self.taken == self.end:
                    return None
                if self.failed is not None:
                    raise self.failed
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError(f"take: part {self.taken} has not come within {timeout} s")
                self.changed.wait(left)
            name, data = self._waiting.popleft()
            self._bytes -= len(data)
            self.taken += 1
            return name, data

    def fail(self, error: TransferFailed) -> None:
        """The first word counts."""
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()

    def conclude(self) -> None:
        with self.changed:
            self.concluded = True
            self.changed.notify_all()

    def wait_over(self, timeout: float) -> bool:
        """Whether it ended within `timeout`, well or not."""
        with self.changed:
            return self.changed.wait_for(lambda: self.concluded or self.failed is not None, timeout)

    def clear(self) -> None:
        with self.changed:
            self._waiting.clear()
            self._bytes = 0
