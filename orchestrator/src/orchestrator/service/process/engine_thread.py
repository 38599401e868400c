"""A worker's engine in a thread of its own, so that its process answers while a step is computed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from orchestrator.roles.engine_port import (
    DecodeDone,
    EncodeDone,
    EngineEvent,
    EnginePort,
    PrefillDone,
    RankDied,
    Reform,
)

IDLE, SOON = 0.02, 0.002  # seconds between looks for answers that no command brings; the second behind a command
_BEHIND = 0.5  # seconds
_FAILURES, _WITHIN = 3, 300.0  # failures within as many seconds after which a new process is the better remedy
_log = logging.getLogger(__name__)

Item = tuple[Any, float]  # a command, or a function to be called, and when it came


class EngineThread:
    """Carries commands out in order. A port that raises has lost what it held: `RankDied` is told, and everything but
    `Reform` is dropped until that comes, as the roles expect it.

    A port may have `listen(function)`: the function is to be called, from any thread, when there are answers that no
    command of this moment brings. Without it they are looked for every few milliseconds.

    Args:
        deliver: called in this thread with each answer.
        fail: called in this thread once, with the reason, when the engine cannot be used any more: it failed while it
            formed anew, or again and again.

    Attributes:
        steps: that were answered. failures: exceptions of the port.
    """

    def __init__(
        self,
        port: EnginePort,
        deliver: Callable[[EngineEvent], None],
        fail: Callable[[str], None],
    ) -> None:
        self.port, self._deliver, self._fail = port, deliver, fail
        self.steps = self.failures = 0
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._current: Item | None = None
        self._group = 0  # of ranks; answers of an earlier one are thrown away
        self._broken = self._closing = self._heard = False
        self._asked_at = 0.0
        self._failed_at: deque[float] = deque(maxlen=_FAILURES)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        listen = getattr(self.port, "listen", None)
        if listen is not None:
            listen(self._listen)
        self._thread.start()

    def do(self, command: Any) -> None:
        """Queue a command. `Reform` takes the place of all that has not begun."""
        with self._changed:
            if isinstance(command, Reform):
                self._group += 1
                self._broken = False
                self._items = deque(item for item in self._items if callable(item[0]))
            elif self._broken:
                return
            self._items.append((command, time.monotonic()))
            self._changed.notify()

    def call(self, function: Callable[[], None]) -> None:
        """Have a function of the port called in its thread, in order with commands."""
        with self._changed:
            self._items.append((function, time.monotonic()))
            self._changed.notify()

    def waiting_since(self) -> float | None:
        """When the oldest thing came that is not done (`time.monotonic`); None if everything is."""
        with self._changed:
            if self._current is not None:
                return self._current[1]
            return self._items[0][1] if self._items else None

    def close(self, timeout: float) -> bool:
        """End the thread behind the command that it is at. False: it is still at it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        with self._changed:
            self._heard = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                if not (self._items or self._closing or self._heard):
                    self._changed.wait(SOON if time.monotonic() - self._asked_at < _BEHIND else IDLE)
                self._heard = False
                if self._closing:
                    return
                if self._items:
                    self._current = self._items.popleft()
                    self._asked_at = time.monotonic()
                group = self._group
            try:
                if self._current is not None:
                    command = self._current[0]
                    if callable(command):
                        command()
                    else:
                        self.port.do(command)
                answers = self.port.answers()
            except Exception as error:
                self._failed(error, group)
                continue
            with self._changed:
                answers = answers if group == self._group and not self._broken else []
            for answer in answers:
                self.steps += isinstance(answer, PrefillDone | DecodeDone | EncodeDone)
                self._deliver(answer)

    def _failed(self, error: Exception, group: int) -> None:
        command = None if self._current is None else self._current[0]
        what = "no command" if command is None else type(command).__name__
        _log.error("engine: failed at %s", what, exc_info=error)
        self.failures += 1
        now = time.monotonic()
        self._failed_at.append(now)
        often = len(self._failed_at) == _FAILURES and now - self._failed_at[0] < _WITHIN
        if isinstance(command, Reform) or often:
            self._fail(f"the engine failed at {what} once more: {error!r}")
            with self._changed:
                self._closing = True
            return
        with self._changed:
            if group != self._group:
                return  # the group was given up meanwhile, and `Reform` waits
            self._broken = True
            self._items = deque(item for item in self._items if callable(item[0]))
        try:
            self.port.answers()  # of commands before the failure: nobody waits for them any more
        except Exception as again:
            _log.error("engine: failed at its answers", exc_info=again)
        self._deliver(RankDied(0))
