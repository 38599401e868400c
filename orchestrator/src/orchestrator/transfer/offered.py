"""A handoff at its sender: parts that are held until the receiver's owner has them, and how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import google_crc32c

from orchestrator.transfer.errors import TransferFailed, require
from orchestrator.transfer.settings import NAME_BYTES, Limits, Times, check_timeout, short

Data = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Held:
    """A part with its CRC32C; `start` is the bytes of all parts before it."""

    name: str
    data: bytes
    crc: int
    start: int


@dataclass(frozen=True)
class Outcome:
    """`good`: the receiver has made use of all parts. Otherwise a reason as in `TransferFailed`, and why."""

    good: bool
    reason: str = ""
    why: str = ""


class Offered:
    """What `Sender.offer` gives. `put`, `finish` and `wait` belong to its owner, `cancel` to anybody.

    Attributes:
        outcome: None until it has ended; nothing is held from then on.
        heard: clock of the last word of the receiver, or of the offer.
        changed: the lock and signal of all that is here.
        pull, link: the receiver that it is bound to, and the link that counts: a new one takes the place of an old one.
    """

    def __init__(self, handoff: bytes, epoch: int, limits: Limits, times: Times) -> None:
        self.handoff, self.epoch, self._limits, self._times = handoff, epoch, limits, times
        self.changed = threading.Condition()
        self.outcome: Outcome | None = None
        self.ended_at = 0.0
        self.heard = time.monotonic()
        self.pull, self.link = b"", object()
        self.finished = False
        self.taken = self.count = 0
        self._parts: dict[int, Held] = {}
        self._bytes = self._freed = 0

    @property
    def held(self) -> int:
        """Bytes of parts that are kept for the receiver."""
        return self._bytes - self._freed

    def put(self, name: str, data: Data, *, timeout: float) -> None:
        """Add the next part; waits while `Limits.held` bytes are not taken. A buffer that may change is copied.

        Raises:
            ValueError: a name or size that is not allowed, or `finish` was called. Nothing is changed.
            TimeoutError: the receiver is slow; nothing is changed, so it may be tried again.
            TransferFailed: the handoff has ended.
        """
        require(isinstance(name, str) and len(name.encode()) <= NAME_BYTES, "name", repr(name)[:300], "255 bytes")
        check_timeout(timeout)
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        require(size <= self._limits.part, "data", f"{size} bytes", f"at most {self._limits.part}")
        kept = data if isinstance(data, bytes) else bytes(data)
        crc = google_crc32c.value(kept)
        with self.changed:
            require(not self.finished, "name", repr(name), "no part behind `finish`")
            require(self.count < self._limits.parts, "name", f"part {self.count}", f"{self._limits.parts} parts")
            total = self._bytes + size
            require(total <= self._limits.total, "data", f"{total} bytes in all", f"at most {self._limits.total}")

            def fits() -> bool:
                return self.outcome is not None or not self.held or self.held + size <= self._limits.held

            if not self._wait(fits, timeout):
                raise TimeoutError(f"put: the receiver has not taken {self.held} bytes within {timeout} s")
            self._raise_if_failed()
            if self.outcome is not None:
                raise TransferFailed("ended", "the receiver has concluded this handoff")
            self._parts[self.count] = Held(name, kept, crc, self._bytes)
            self._bytes, self.count = total, self.count + 1
            self.changed.notify_all()

    def finish(self) -> None:
        """No more parts will come."""
        with self.changed:
            self.finished = True
            self.changed.notify_all()

    def wait(self, *, timeout: float) -> None:
        """Until the receiver has made use of all parts. Raises TimeoutError; TransferFailed if it will not."""
        check_timeout(timeout)
        with self.changed:
            if not self._wait(lambda: self.outcome is not None, timeout):
                raise TimeoutError(f"wait: the receiver has not concluded within {timeout} s")
            self._raise_if_failed()

    def cancel(self, why: str = "by the sender") -> bool:
        """Free all. False, with nothing done, if it has ended before."""
        return self.end(Outcome(False, "cancelled", short(why)))

    # For the links

    def end(self, outcome: Outcome) -> bool:
        with self.changed:
            if self.outcome is not None:
                return False
            self.outcome, self.ended_at = outcome, time.monotonic()
            self._parts.clear()
            self._freed = self._bytes
            self.changed.notify_all()
            return True

    def part(self, number: int, window: int) -> Held | None:
        """A part, if it is there and `window` has room for it. The lock is held."""
        held = self._parts.get(number)
        if held is None or (number > self.taken and held.start - self._freed + len(held.data) > window):
            return None
        return held

    def free(self, taken: int) -> None:
        """The receiver's owner has the first `taken` parts. The lock is held."""
        while self.taken < taken:
            self._freed += len(self._parts.pop(self.taken).data)
            self.taken += 1
        self.changed.notify_all()

    def check_lease(self) -> bool:
        """End it if the receiver has said nothing for the lease; whether it has ended."""
        with self.changed:
            if self.outcome is None and time.monotonic() - self.heard > self._times.lease:
                self.end(Outcome(False, "lease", f"no word from the receiver for {self._times.lease} s"))
            return self.outcome is not None

    def _wait(self, true: Callable[[], bool], timeout: float) -> bool:
        """Keeps an eye on the lease meanwhile."""
        until = time.monotonic() + timeout
        while not true():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.changed.wait(min(left, self._times.beat))
            self.check_lease()
        return True

    def _raise_if_failed(self) -> None:
        if self.outcome is not None and not self.outcome.good:
            raise TransferFailed(self.outcome.reason, self.outcome.why)
