"""What a directory store keeps beside its blocks, as files whose name and modification time say everything.

Uses: one empty file a last block of a used path; its modification time is the use. Leases: one empty file a lease; its
name starts with the key of the path's last block, its modification time is the end. Nobody reads these files and their
times are set by call, so neither reads nor a mount's rule for access times move them. A block's owner stands behind its
payload, with a checksum of its own.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import google_crc32c

from orchestrator.cache.chain import KEY_BYTES
from orchestrator.cache.index import BlockIndex

_OWNER = struct.Struct("<4sHI")  # magic, bytes of the name before it, their CRC32C
_MAGIC = b"OWNR"
MOST_OWNER_BYTES = 1024
_NAME = 2 * KEY_BYTES


def seal_owner(tenant: str) -> bytes:
    """What a first block's file ends with. ValueError for a name above 1,024 bytes."""
    name = tenant.encode()
    if len(name) > MOST_OWNER_BYTES:
        raise ValueError(f"tenant: got {len(name)} bytes, allowed are {MOST_OWNER_BYTES}")
    return name + _OWNER.pack(_MAGIC, len(name), google_crc32c.value(name)) if name else b""


def read_owner(fd: int, behind: int) -> str:
    """The owner that stands behind the first `behind` bytes of a file; "" where none stands there unharmed."""
    tail = os.pread(fd, MOST_OWNER_BYTES + _OWNER.size, behind)
    if len(tail) < _OWNER.size:
        return ""
    name = tail[: -_OWNER.size]
    magic, length, crc = _OWNER.unpack(tail[-_OWNER.size :])
    if magic != _MAGIC or length != len(name) or crc != google_crc32c.value(name):
        return ""
    return name.decode(errors="replace")


def _appear(path: Path, when: float, token: str) -> None:
    """An empty file that nobody sees with another time. `token` is nobody else's, on no machine."""
    hidden = path.with_name(f"new-{token}-{threading.get_ident()}")
    os.close(os.open(hidden, os.O_WRONLY | os.O_CREAT, 0o600))
    os.utime(hidden, (when, when))
    hidden.rename(path)


def _left_over(path: Path) -> bool:
    """Is this a file that has not appeared yet? One that a crash left behind goes after an hour."""
    if not path.name.startswith("new-"):
        return False
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_ctime > 3600:
            path.unlink()
    return True


class Uses:
    """When paths were used last. A crash may forget what the file system had not yet written down."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, self._token = folder, token
        folder.mkdir(parents=True, exist_ok=True)

    def note(self, key: bytes, when: float) -> None:
        """A use of the path that ends with a block; never moves one back. Failures are forgotten uses."""
        path = self._folder / key.hex()[:2] / key.hex()
        with contextlib.suppress(OSError):
            try:
                if path.stat().st_mtime < when:
                    os.utime(path, (when, when))
            except FileNotFoundError:
                path.parent.mkdir(exist_ok=True)
                _appear(path, when, self._token)

    def __iter__(self) -> Iterator[tuple[bytes, float]]:
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError, ValueError):
                if not _left_over(path):
                    yield bytes.fromhex(path.name), path.stat().st_mtime

    def forget(self, key: bytes) -> None:
        with contextlib.suppress(OSError):
            (self._folder / key.hex()[:2] / key.hex()).unlink()


class LeaseFiles:
    """Leases of all readers of a directory. A reader that dies holds a path until its lease ends."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, self._token = folder, token
        folder.mkdir(parents=True, exist_ok=True)
        self._ids = count(1)
        self._mine: dict[int, Path] = {}

    def take(self, keys: list[bytes], until: float, there: Callable[[], bool]) -> int | None:
        """Hold a path. The file comes first and the look second: a collector that missed the file sees it afterwards
        and brings back what it took."""
        number = next(self._ids)
        path = self._folder / f"{keys[-1].hex()}-{self._token}-{number}"
        try:
            _appear(path, until, self._token)
        except OSError:
            return None
        self._mine[number] = path
        if there():
            return number
        self.give(number)
        return None

    def give(self, number: int) -> bool:
        """End a lease. False where it is over already."""
        path = self._mine.pop(number, None)
        if path is None:
            return False
        try:
            path.unlink()
        except OSError:
            return False
        return True

    def held(self, now: float) -> Counter[bytes]:
        """Last blocks of leased paths, and how many leases each has; removes leases that are over."""
        found: Counter[bytes] = Counter()
        for path in self._folder.iterdir():
            if _left_over(path):
                continue
            with contextlib.suppress(OSError, ValueError):
                key = bytes.fromhex(path.name[:_NAME])
                if path.stat().st_mtime <= now:
                    path.unlink()
                else:
                    found[key] += 1
        return found

    def mark(self, index: BlockIndex, now: float) -> None:
        """Lease the entries of a fresh index."""
        for key, number in self.held(now).items():
            entry = index.get(key)
            if entry is not None:
                entry.leases += number
