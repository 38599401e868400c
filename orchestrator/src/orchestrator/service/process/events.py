"""What waits for a shell's loop: messages, answers of its engine, and what its own process tells it."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Iterator
from typing import Any

MOST_MESSAGES = 65_536
_MESSAGES, _ANSWERS = 1024, 1024  # of a turn at most: neither starves the other, or the ticks


class ShellEvents:
    """Filled from any thread, and from signal handlers; emptied by one thread.

    Attributes:
        dropped: messages for which there was no room.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._messages: deque[Any] = deque()
        self._answers: deque[Any] = deque()
        self._notices: deque[Any] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt itself
        self._rung = False

    def message(self, message: Any) -> None:
        """Dropped if too many wait."""
        if len(self._messages) >= MOST_MESSAGES:
            self.dropped += 1
            return
        self._messages.append(message)
        self._ring()

    def answer(self, answer: Any) -> None:
        self._answers.append(answer)
        self._ring()

    def notice(self, notice: Any) -> None:
        """Comes before everything else."""
        self._notices.append(notice)
        self._ring()

    def wait(self, seconds: float) -> None:
        """Until something is there, no longer than `seconds`."""
        if not (self._messages or self._answers or self._notices):
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=max(0.0, seconds))
        self._rung = False  # before anything is taken: what comes from here on rings again

    def turn(self) -> Iterator[Any]:
        """What is there now, and is to be handled before the next look at the clock: notices, answers, messages."""
        while self._notices:
            yield self._notices.popleft()
        for _ in range(min(len(self._answers), _ANSWERS)):
            yield self._answers.popleft()
        for _ in range(min(len(self._messages), _MESSAGES)):
            yield self._messages.popleft()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._bell.put(None)
