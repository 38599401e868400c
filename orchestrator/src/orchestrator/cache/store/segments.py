"""Append-only segment files: where block bytes lie. A place is never written twice, a number never used again."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cache.store.base import At, nowhere

_NAME = re.compile(r"segment-(\d{10})\.blocks")


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [offset, offset + size) of a segment."""

    segment: int
    offset: int
    size: int


class Segments:
    """The segment files of a folder.

    An append is durable when it returns. A failed one leaves nothing behind that a later append could touch. Every
    start begins a new segment: what a crash left at the end of the last one is never overwritten.
    """

    def __init__(self, folder: Path, segment_bytes: int, at: At = nowhere) -> None:
        self.folder, self.segment_bytes, self._at = folder, segment_bytes, at
        folder.mkdir(parents=True, exist_ok=True)
        found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
        self.sizes = {int(m[1]): (folder / m[0]).stat().st_size for m in found if m}
        self.live = dict.fromkeys(self.sizes, 0)
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._current: int | None = None
        self._last = max(self.sizes, default=0)

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def append(self, objects: Sequence[tuple[bytes, bytes]]) -> list[Place]:
        """Write (header, payload) pairs, one after the other, and make them durable. Raises OSError."""
        places: list[Place] = []
        if not objects:
            return places
        number = self._open_for(sum(len(h) + len(p) for h, p in objects))
        fd, start = self._fds[number], self.sizes[number]
        try:
            offset = start
            for header, payload in objects:
                self._at("segment.write")
                _write_all(fd, header, offset)
                self._at("segment.half")
                _write_all(fd, payload, offset + len(header))
                size = len(header) + len(payload)
                places.append(Place(number, offset, size))
                offset += size
            self._at("segment.sync")
            os.fdatasync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, start)
            self._current = None
            raise
        self.sizes[number] = offset
        self.live[number] += offset - start
        return places

    def read(self, place: Place) -> bytes:
        """The bytes at a place, fewer where the file is shorter. Raises OSError."""
        return os.pread(self._fd(place.segment), place.size, place.offset)

    def adopt(self, place: Place) -> bool:
        """Count a place that a record points at as live. False where the file does not reach so far."""
        if place.offset + place.size > self.sizes.get(place.segment, 0):
            return False
        self.live[place.segment] += place.size
        return True

    def free(self, place: Place) -> None:
        """These bytes will not be read again."""
        self.live[place.segment] -= place.size

    def remove_dead(self) -> int:
        """Delete files without live bytes. Returns the bytes gained."""
        gained = 0
        for number in [n for n, live in self.live.items() if not live and n != self._current]:
            self._at("segment.unlink")
            with self._lock:
                fd = self._fds.pop(number, None)
                if fd is not None:
                    os.close(fd)
                (self.folder / _name(number)).unlink(missing_ok=True)
            gained += self.sizes.pop(number)
            del self.live[number]
        return gained

    def sparse(self, share: float) -> list[int]:
        """Files of which less than `share` is live, emptiest first."""
        full = [n for n in self.sizes if n != self._current and self.sizes[n]]
        thin = [n for n in full if 0 < self.live[n] < share * self.sizes[n]]
        return sorted(thin, key=lambda n: self.live[n] / self.sizes[n])

    def rotate(self) -> None:
        """Begin a new file with the next append."""
        self._current = None

    def close(self) -> None:
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
        self._current = None

    def _open_for(self, size: int) -> int:
        if self._current is not None and self.sizes[self._current] + size <= self.segment_bytes:
            return self._current
        self._last += 1
        self._at("segment.create")
        fd = os.open(self.folder / _name(self._last), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._fds[self._last], self.sizes[self._last], self.live[self._last] = fd, 0, 0
        self._current = self._last
        sync_folder(self.folder)
        return self._last

    def _fd(self, number: int) -> int:
        with self._lock:
            if number not in self._fds:
                self._fds[number] = os.open(self.folder / _name(number), os.O_RDWR)
            return self._fds[number]


def sync_folder(folder: Path) -> None:
    """Make names of new and removed files durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _name(number: int) -> str:
    return f"segment-{number:010d}.blocks"


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
