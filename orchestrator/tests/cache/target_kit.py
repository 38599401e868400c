"""Targets in memory that fail as they are told to."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator

from orchestrator.cache.erasure.targets import Target


class MemoryTarget(Target):
    """`dead`: does not answer. `full`: takes nothing more. `delay_s`: of the next read. Files can be changed."""

    def __init__(self, name: str, domain: str | None = None) -> None:
        self.name, self.domain = name, domain or name
        self.files: dict[str, bytes] = {}
        self.dead = self.full = False
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.reads = 0
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        self._alive()
        if self.full:
            raise OSError(errno.ENOSPC, "full")
        self.files[name] = data

    def get(self, name: str) -> bytes | None:
        self._alive()
        with self._lock:
            self.reads += 1
        if delay := self.delay_s():
            time.sleep(delay)
        return self.files.get(name)

    def delete(self, name: str) -> None:
        self._alive()
        self.files.pop(name, None)

    def names(self) -> Iterator[tuple[str, float]]:
        self._alive()
        return iter([(name, 0.0) for name in self.files])

    def _alive(self) -> None:
        if self.dead:
            raise OSError(errno.EHOSTDOWN, "dead")


def targets(count: int = 12) -> list[MemoryTarget]:
    return [MemoryTarget(f"t{n:02d}") for n in range(count)]
