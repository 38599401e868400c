"""Registered memory: one block a process and direction, in equal chunks that are lent and come back."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from dataclasses import dataclass

from orchestrator.transfer.errors import require


@dataclass(frozen=True, eq=False)
class Chunk:
    """`view` is the memory at `address`."""

    view: memoryview
    address: int


class Chunks:
    """`count` chunks of `size` bytes. An engine or a network card may use them until the process ends.

    Attributes:
        address, size, bytes: of the block, of a chunk, of all.
    """

    def __init__(self, size: int, count: int) -> None:
        require(size > 0 and size % mmap.PAGESIZE == 0, "size", size, f"a multiple of {mmap.PAGESIZE}")
        require(count > 1, "count", count, "2 or more")
        self.size, self.bytes = size, size * count
        self._memory = mmap.mmap(-1, self.bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        view = memoryview(self._memory)
        self._free = [Chunk(view[at : at + size], self.address + at) for at in range(0, self.bytes, size)]
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, timeout: float) -> Chunk | None:
        """None if all are lent for so long."""
        until = time.monotonic() + timeout
        with self._changed:
            while not self._free:
                if (left := until - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left)
            return self._free.pop()

    def give(self, chunk: Chunk) -> None:
        """Back, once nobody reads or writes it any more, or what is read there will not be used."""
        with self._changed:
            self._free.append(chunk)
            self._changed.notify()
