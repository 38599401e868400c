"""A queue pair in memory, with a seeded schedule and faults on request. Bytes move when a request completes."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum

from gdr_swapin.rdma.queue_pair import Completion, Status, WorkRequest
from gdr_swapin.transfer import Busy
from kernel_core import check


class Fault(Enum):
    """What happens to one request.

    SHORT: half of its bytes, and a completion that says so. ERROR: some bytes and an error; later requests are flushed.
    DUPLICATE: it completes twice. LOST: it moves its bytes and never completes. LATE: it neither moves bytes nor
    completes until `release_late`. FOREIGN: a completion of a request that nobody posted comes with it. REFUSED:
    posting it raises.
    """

    SHORT = "short"
    ERROR = "error"
    DUPLICATE = "duplicate"
    LOST = "lost"
    LATE = "late"
    FOREIGN = "foreign"
    REFUSED = "refused"


class SimulatedQueue:
    """Completes up to `speed` requests a poll, out of the first `window` posted ones in random order.

    faults: number of a request, counted over all that were ever posted, to what happens to it.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        depth: int = 64,
        window: int = 8,
        speed: int = 4,
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        check.require(depth >= 1, "depth", depth, "at least 1")
        check.require(window >= 1, "window", window, "at least 1")
        check.require(speed >= 1, "speed", speed, "at least 1")
        self.depth = depth
        self._random = random.Random(seed)
        self._window, self._speed = window, speed
        self._faults = dict(faults or {})
        self._posted: list[tuple[WorkRequest, Fault | None]] = []
        self._ready: deque[Completion] = deque()
        self._late: list[WorkRequest] = []
        self._count = 0
        self._broken = False
        self.order: list[int] = []  # ids as they completed
        self.resets = 0
        self.peak = 0  # most requests in the queue at once

    def post(self, requests: Sequence[WorkRequest]) -> None:
        """Busy where they do not fit; OSError for a request with the fault REFUSED."""
        in_queue = len(self._posted) + len(self._late) + len(requests)
        if in_queue > self.depth:
            raise Busy(f"{in_queue} requests, the queue takes {self.depth}")
        faults = [self._faults.get(self._count + i) for i in range(len(requests))]
        self._count += len(requests)
        if Fault.REFUSED in faults:
            raise OSError("the card refused the request")
        self._posted += zip(requests, faults, strict=True)
        self.peak = max(self.peak, in_queue)

    def poll(self, most: int) -> list[Completion]:
        for _ in range(min(self._speed, len(self._posted))):
            chosen = self._random.randrange(min(self._window, len(self._posted)))
            self._complete(*self._posted.pop(chosen))
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def reset(self) -> None:
        """Late requests are forgotten too: they will not write."""
        self._posted.clear()
        self._ready.clear()
        self._late.clear()
        self._broken = False
        self.resets += 1

    def release_late(self) -> int:
        """What a card does that was not reset: late requests write now. Returns how many did."""
        late, self._late = self._late, []
        for request in late:
            _move(request, request.bytes)
        return len(late)

    def _complete(self, request: WorkRequest, fault: Fault | None) -> None:
        if self._broken:
            self._ready.append(Completion(request.id, Status.FLUSHED, 0))
            return
        if fault is Fault.LATE:
            self._late.append(request)
            return
        moved = request.bytes // 2 if fault in (Fault.SHORT, Fault.ERROR) else request.bytes
        _move(request, moved)
        self.order.append(request.id)
        if fault is Fault.ERROR:
            self._broken = True
            self._ready.append(Completion(request.id, Status.ERROR, moved))
            return
        if fault is Fault.FOREIGN:
            self._ready.append(Completion(request.id + 1_000_000_000, Status.SUCCESS, request.bytes))
        if fault is not Fault.LOST:
            self._ready.extend([Completion(request.id, Status.SUCCESS, moved)] * (2 if fault is Fault.DUPLICATE else 1))


def _move(request: WorkRequest, size: int) -> None:
    ctypes.memmove(request.target, request.source, size)
