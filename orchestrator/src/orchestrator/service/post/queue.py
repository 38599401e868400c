"""What waits in a post for one address: bounded by number, bytes and age."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MOST_MESSAGES = 4096
MOST_BYTES = 256 << 20
MOST_AGE = 10.0  # seconds; by then whoever sent it has repeated it, or does not need it any more


class Letter(NamedTuple):
    """Frames of a message, and the time of `send`."""

    frames: tuple[bytes, bytes, bytes]
    at: float

    @property
    def size(self) -> int:
        return len(self.frames[1])


class PostQueue:
    """Not thread-safe: the post's lock is held. `size`: bytes that wait."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self.size = 0

    def __len__(self) -> int:
        return len(self._letters)

    def fits(self, size: int) -> bool:
        return len(self._letters) < MOST_MESSAGES and (not self._letters or self.size + size <= MOST_BYTES)

    def put(self, letter: Letter) -> None:
        self._letters.append(letter)
        self.size += letter.size

    @property
    def head(self) -> Letter:
        """The next to go; there has to be one."""
        return self._letters[0]

    def pop(self) -> None:
        self.size -= self._letters.popleft().size

    def forget_late(self, now: float) -> int:
        """Drop what is too old; how many."""
        count = 0
        while self._letters and now - self._letters[0].at > MOST_AGE:
            self.pop()
            count += 1
        return count
