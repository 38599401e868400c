"""Snapshots asked of peers for requests that wait, beside the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from orchestrator.cache.windows import WindowKey, WindowStore


class WindowPull:
    """One question under way. `done` is True once it is answered, or its deadline has passed."""

    def __init__(self, answer: Future[WindowKey | None], until: float) -> None:
        self._answer, self._until = answer, until

    @property
    def done(self) -> bool:
        return self._answer.done() or time.monotonic() >= self._until

    def release(self) -> None:
        """Give it up, if it has not begun."""
        self._answer.cancel()


class WindowPulls:
    """Asks the peers of a `WindowStore`.

    Args:
        deadline_s: a request waits so long for its windows at most, and does without them then.
        on_done: called from another thread when an answer has come, or none will.
    """

    def __init__(self, windows: WindowStore, deadline_s: float, on_done: Callable[[], None]) -> None:
        self._windows, self._deadline_s, self._on_done = windows, deadline_s, on_done
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="windows")

    def start(self, keys: list[WindowKey]) -> WindowPull:
        """Ask for the first of `keys` that is to be had; it is in the store once that is done."""
        answer = self._pool.submit(self._windows.pull, keys)
        answer.add_done_callback(lambda _: self._on_done())
        return WindowPull(answer, time.monotonic() + self._deadline_s)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
