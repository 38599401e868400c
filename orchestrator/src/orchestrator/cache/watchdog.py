"""Ends fetches whose deadline passed without a word from the I/O process, which may hang."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Watchdog:
    """Calls functions at their times, on one thread that is started with the first of them."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds. What is called must not wait for anything."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._tie), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Nothing more is called."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                call = heapq.heappop(self._due)[2]
            call()
