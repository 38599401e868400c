"""A store in a directory that several machines may mount (NFS, 3FS, local disk): one file a block, no server of ours.

A file appears under its key by rename, whole and durable, and says in its header what it is, and as its generation when
it was written, in milliseconds. Its modification time is its expiry. Uses, leases and owners: see `directory_notes`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from orchestrator.cache.block_object import HEADER_BYTES, WrongBytes, seal, verify
from orchestrator.cache.gc import Collector, Tick, Unpublish
from orchestrator.cache.index import BlockIndex
from orchestrator.cache.retention import Retention, RetentionPolicy
from orchestrator.cache.store.base import At, Block, Put, Store, StoreStats, nowhere
from orchestrator.cache.store.directory_notes import LeaseFiles, Uses, seal_owner
from orchestrator.cache.store.directory_survey import survey, there
from orchestrator.cache.store.directory_usage import Usage
from orchestrator.cache.store.segments import sync_folder

_THREADS = 16


class DirectoryStore(Store):
    """Blocks of one layout in a folder that any number of processes and machines write.

    The collector builds its index by walking the folder; of all processes that call `collect`, the one that gets the
    lock file works, by its own policy, and tells the others how full it is. A chain belongs to the tenant that wrote
    its first block.

    Args:
        turn_s: seconds after any process's turn of the collector in which this one takes none.
    """

    def __init__(
        self, folder: Path, layout: bytes, capacity: int, policy: RetentionPolicy | None = None, at: At = nowhere,
        *, turn_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.policy = policy or RetentionPolicy()
        if capacity <= 0:
            raise ValueError(f"capacity: got {capacity}, allowed are bytes above 0")
        self.folder, self.layout, self.capacity, self._at, self.turn_s = folder, layout, capacity, at, turn_s
        self._token = secrets.token_hex(8)  # host and process number do not tell containers apart
        self._blocks, self._trash = folder / "blocks" / layout.hex()[:16], folder / "trash"
        for path in (self._blocks, self._trash):
            path.mkdir(parents=True, exist_ok=True)
        self._uses = Uses(folder / "uses" / layout.hex()[:16], self._token)
        self._leases = LeaseFiles(folder / "leases" / layout.hex()[:16], self._token)
        self._usage = Usage(folder, self._token)
        self._misses: Counter[str] = Counter()
        self._seen_used = self._seen_blocks = 0
        self._names = count(1)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "directory")

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        return list(self._threads.map(lambda key: there(self._path(key)), keys))

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(self._threads.map(self._read, keys))

    def write(self, blocks: Sequence[Block], now: float) -> list[Put]:
        return [self._write(block, now) for block in blocks]

    def use(self, keys: Sequence[bytes], now: float, retention: Retention) -> None:
        """Touches every file of the path, the first first: a parent never expires before its child."""
        expiry = self.policy.expiry(now, retention)
        path = keys[: self.match(keys)]
        for key in path:
            with contextlib.suppress(OSError):
                self._touch(self._path(key), now, expiry)
        if path:
            self._uses.note(path[-1], now)

    def pin(self, keys: Sequence[bytes], until: float) -> int | None:
        return self._leases.take(list(keys), until, lambda: self.match(keys) == len(keys)) if keys else None

    def unpin(self, lease: int) -> bool:
        return self._leases.give(lease)

    def collect(self, now: float) -> int:
        if self._usage.age(now) < self.turn_s:
            return self._listen()
        with (self.folder / "collector.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return self._listen()
            self._empty_trash(now)
            index, holes = self._survey()
            self._leases.mark(index, now)
            gone = [(key, self._discard(key, now)) for key in holes]
            taken: dict[bytes, tuple[bytes, Path | None]] = {}
            for action in Collector(index, self.capacity).step(Tick(), now):
                if isinstance(action, Unpublish):
                    for parent in {entry.parent for entry in action.entries}:
                        if parent is not None and parent.visible:  # it inherited a use and a stay: write them down
                            self._uses.note(parent.key, parent.atime)
                            with contextlib.suppress(OSError):
                                self._touch(self._path(parent.key), now, parent.expiry)
                    for entry in action.entries:
                        taken[entry.key] = entry.parent_key, self._discard(entry.key, now)
            back = self._bring_back(taken, now)
            for key in [*(key for key, _ in gone), *(taken.keys() - back)]:
                self._uses.forget(key)
            self._seen_used, self._seen_blocks = index.used, len(index)
            self._usage.tell(index.used, len(index), now)
            return len(gone) + len(taken) - len(back)

    def _survey(self) -> tuple[BlockIndex, list[bytes]]:
        return survey(self._blocks, self._path, self._uses, self.policy)

    def _listen(self) -> int:
        """Another collects: take its word for how full the directory is."""
        told = self._usage.read()
        if told is not None:
            self._seen_used, self._seen_blocks = told
        return 0

    def _bring_back(self, taken: dict[bytes, tuple[bytes, Path | None]], now: float) -> set[bytes]:
        """What a reader leased between the look at the leases and the removal. It keeps its path, parents first."""
        back: set[bytes] = set()
        for key in self._leases.held(now) if taken else ():
            path = []
            while key in taken and key not in back:
                path.append(key)
                key = taken[key][0]
            for one in reversed(path):
                buried = taken[one][1]
                if buried is not None:
                    with contextlib.suppress(OSError):
                        buried.rename(self._path(one))
                        back.add(one)
        return back

    def stats(self) -> StoreStats:
        return StoreStats(self._seen_blocks, self._seen_used, self.capacity, dict(self._misses))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _read(self, key: bytes) -> bytes | None:
        path = self._path(key)
        try:
            return verify(path.read_bytes(), self.layout, key)
        except FileNotFoundError:
            reason = "absent"
        except OSError:
            reason = "io"
        except WrongBytes as wrong:
            reason = wrong.reason
            self._discard(key, time.time())
        self._misses[reason] += 1
        return None

    def _write(self, block: Block, now: float) -> Put:
        path = self._path(block.key)
        if there(path):
            return Put.ALREADY
        if block.depth and not there(self._path(block.parent)):
            return Put.NO_PARENT
        try:
            owner = seal_owner("" if block.depth else block.tenant)
        except ValueError:
            return Put.FAILED
        size = HEADER_BYTES + len(block.payload) + len(owner)
        if self._seen_used + size > self.capacity:
            return Put.FULL
        header = seal(self.layout, block.key, block.parent, block.depth, max(0, int(now * 1e3)), block.payload)
        temporary = path.parent / f"new-{self._token}-{next(self._names)}"
        try:
            path.parent.mkdir(exist_ok=True)
            self._at("file.create")
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(fd, header)
                self._at("file.half")
                for view in (memoryview(block.payload), memoryview(owner)):
                    while view:
                        view = view[os.write(fd, view) :]
                os.utime(fd, (now, self.policy.expiry(now, block.retention)))
                self._at("file.sync")
                os.fsync(fd)
            finally:
                os.close(fd)
            self._at("file.rename")
            temporary.rename(path)
            self._at("file.renamed")
            sync_folder(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return Put.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else Put.FAILED
        with self._lock:
            self._seen_used += size
            self._seen_blocks += 1
        return Put.STORED

    @staticmethod
    def _touch(path: Path, now: float, expiry: float) -> None:
        os.utime(path, (now, max(path.stat().st_mtime, expiry)))

    def _discard(self, key: bytes, now: float) -> Path | None:
        """Out of sight at once, deleted after the grace: a reader that has the file open goes on reading it.

        Answers with the place in the trash, or None where there was nothing to move.
        """
        self._at("file.discard")
        buried = self._trash / f"{int(now)}-{self._token}-{next(self._names)}"
        try:
            self._path(key).rename(buried)
        except OSError:
            return None
        return buried

    def _empty_trash(self, now: float) -> None:
        for path in self._trash.iterdir():
            stamp = path.name.partition("-")[0]
            if stamp.isdecimal() and now - int(stamp) >= self.policy.grace_s:
                path.unlink(missing_ok=True)
        for folder in self._blocks.iterdir():
            for path in folder.glob("new-*"):  # left by a crash; a write takes no hour
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_ctime > 3600:
                        path.unlink()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._blocks / name[:2] / name
