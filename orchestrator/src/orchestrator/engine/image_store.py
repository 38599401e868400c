"""Embeddings of images in host memory: those of requests, and as many others as there is room for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch

from kernel_core.check import require
from orchestrator.engine.request import EngineFull


class _Entry:
    def __init__(self, size: int) -> None:
        self.size, self.holders = size, 0
        self.rows: torch.Tensor | None = None
        self.making = threading.Lock()


class ImageStore:
    """Rows by key, within `capacity` bytes. Thread-safe.

    What a request holds is never given up; of the rest the least recently used goes first. Counts `hits`, `misses` and
    `evictions`.
    """

    def __init__(self, capacity: int) -> None:
        require(capacity >= 0, "capacity", capacity, "0 or more bytes")
        self.capacity = capacity
        self.hits = self.misses = self.evictions = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self._bytes = self._held = 0

    @property
    def size(self) -> int:
        """Of all rows, and of those that are being made."""
        return self._bytes

    @property
    def held(self) -> int:
        """Of what requests hold."""
        return self._held

    def hold(self, key: bytes, size: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The rows of a key, for one more holder; `make` is called where they are not here, by one caller at a time.

        `size` is what they take in bytes. Raises EngineFull, before anything is made, while holders leave no room;
        ValueError for what never has room; and what `make` raises.
        """
        entry = self._claim(key, size)
        try:
            with entry.making:
                if entry.rows is None:
                    entry.rows = make()
                return entry.rows
        except BaseException:
            self.release(key)
            raise

    def release(self, key: bytes) -> None:
        """One holder less. The rows stay while there is room."""
        with self._lock:
            entry = self._entries[key]
            require(entry.holders > 0, "key", f"{key.hex()}, which nobody holds", "a key that is held")
            entry.holders -= 1
            if entry.holders == 0:
                self._held -= entry.size
                if entry.rows is None:  # its making failed
                    self._drop(key)

    def _claim(self, key: bytes, size: int) -> _Entry:
        with self._lock:
            entry = self._entries.get(key)
            grown = size if entry is None or entry.holders == 0 else 0
            if size > self.capacity:
                raise ValueError(
                    f"images: got one whose embeddings take {size} bytes, allowed are {self.capacity} (image_bytes)"
                )
            if self._held + grown > self.capacity:
                raise EngineFull(
                    f"images of other requests take {self._held} of {self.capacity} bytes; try again later"
                )
            if entry is None:
                self.misses += 1
                entry = self._entries[key] = _Entry(size)
                self._bytes += size
            else:
                self.hits += 1
            self._held += grown
            entry.holders += 1
            self._entries.move_to_end(key)
            self._shrink()
            return entry

    def _shrink(self) -> None:
        """Give up what nobody holds until the rest fits, which it does: what is held fits."""
        for key in [k for k, e in self._entries.items() if e.holders == 0]:
            if self._bytes <= self.capacity:
                return
            self._drop(key)
            self.evictions += 1

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._entries.pop(key).size
