"""What the client hands out for work that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.cache.block_object import WrongBytes
from orchestrator.cache.host.arena import HostArena
from orchestrator.cache.io import messages as m
from orchestrator.cache.store.base import Put


class Handle:
    """An answer that may not have come yet; `finish(None)` says that none will."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.answer: m.Message | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._done.wait(timeout_s)

    def finish(self, answer: m.Message | None) -> None:
        """The first call counts: an answer and the loss of the link may come at the same moment."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.answer = answer
        self.take(answer)
        self._done.set()
        try:
            self.call_back()
        except Exception as error:  # the engine's own; other answers still have to come through this thread
            print(f"kv-cache: a callback failed: {type(error).__name__}: {error}", flush=True)

    def take(self, answer: m.Message | None) -> None:
        """Keep what the answer says."""

    def call_back(self) -> None:
        """Tell who asked to be told."""


class _Owner(Protocol):
    arena: HostArena | None

    def release(self, handle: FetchHandle) -> None: ...


class FetchHandle(Handle):
    """Blocks on their way into host memory, or there.

    Attributes:
        slots: (slot, generation) of the blocks that have come, from the first on. They stay where they are until
            `release`, unless the I/O process dies: ask `intact` after copying out of `HostArena.payload`.
    """

    def __init__(
        self, id: int, keys: Sequence[bytes], owner: _Owner, on_done: Callable[[FetchHandle], None] | None
    ) -> None:
        super().__init__(id)
        self.keys, self.slots = list(keys), []  # type: tuple[list[bytes], list[tuple[int, int]]]
        self._owner, self._on_done, self._arena = owner, on_done, owner.arena

    @property
    def blocks(self) -> int:
        """Blocks that have come without a gap; 0 before the fetch is done."""
        return len(self.slots)

    def payload(self, number: int) -> bytes | None:
        """A verified copy, None where the bytes are no longer the block's: cut the hit there."""
        if not 0 <= number < self.blocks:
            raise ValueError(f"number: got {number}, allowed are 0 to {self.blocks - 1}")
        assert self._arena is not None
        try:
            return self._arena.read(self.slots[number][0], self.keys[number], self.slots[number][1])
        except WrongBytes:
            return None

    def intact(self) -> int:
        """How many first blocks are still in their slots: what was copied out before is good."""
        held = [
            self._arena is not None and self._arena.holds(slot, key, generation)
            for key, (slot, generation) in zip(self.keys, self.slots, strict=False)
        ]
        return held.index(False) if False in held else len(held)

    def release(self) -> None:
        self._owner.release(self)

    def take(self, answer: m.Message | None) -> None:
        if isinstance(answer, m.Fetched):
            self.slots = list(answer.slots)

    def call_back(self) -> None:
        if self._on_done is not None:
            self._on_done(self)


class InsertHandle(Handle):
    """Blocks on their way into the store; `puts` has one result a block once it is done."""

    def __init__(self, id: int, count: int, on_done: Callable[[InsertHandle], None] | None) -> None:
        super().__init__(id)
        self.puts = [Put.FAILED] * count
        self._on_done = on_done

    def take(self, answer: m.Message | None) -> None:
        count = len(self.puts)
        if isinstance(answer, m.Committed):
            puts = [Put(value) for value in answer.puts]
            self.puts = puts + [Put.REFUSED] * (count - len(puts))
        elif isinstance(answer, m.Reserved):  # none was to be had
            self.puts = [Put.REFUSED] * count

    def call_back(self) -> None:
        if self._on_done is not None:
            self._on_done(self)
