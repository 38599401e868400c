"""Hands full blocks to the I/O process beside the engine's thread, with as many under way as it has room for."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.cache.chain import Chain
from orchestrator.cache.client import CacheClient
from orchestrator.cache.retention import Retention
from orchestrator.cache.store.base import Put

_BATCH = 16
_PATIENCE_S = 30.0  # for a batch that was accepted
_ROOM_S, _NAP_S = 5.0, 0.02  # for room, when batches are refused


@dataclass(frozen=True)
class Job:
    """Payloads of blocks `first`, `first + 1`, ... of a path with these keys, which begins behind `root`."""

    root: bytes
    keys: Sequence[bytes]
    first: int
    payloads: Sequence[bytes]
    retention: Retention
    tenant: str

    @property
    def size(self) -> int:
        return sum(map(len, self.payloads))


class StoreWriter:
    """A queue of blocks and the thread that empties it. What does not fit is dropped and counted: a shorter hit.

    Args:
        most_bytes: that may wait.

    Attributes:
        counts: blocks by what became of them (`Put` values), "there" those that needed no writing, "dropped".
    """

    def __init__(self, client: CacheClient, most_bytes: int = 256 << 20) -> None:
        self.client, self.most_bytes = client, most_bytes
        self.counts: Counter[str] = Counter()
        self._jobs: deque[Job] = deque()
        self._waiting = 0
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> bool:
        """Take blocks, whose payloads nobody changes any more. Never waits. False where there is no room."""
        with self._changed:
            if self._closed or self._waiting + job.size > self.most_bytes:
                self.counts["dropped"] += len(job.payloads)
                return False
            self._jobs.append(job)
            self._waiting += job.size
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits. False where the time was over before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self) -> None:
        """Drop what waits."""
        with self._changed:
            self._closed = True
            self.counts["dropped"] += sum(len(job.payloads) for job in self._jobs)
            self._jobs.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                self._write(job)
            except Exception as error:  # one path's trouble, say a payload of another size; others still have to go
                self.counts[Put.FAILED.value] += len(job.payloads)
                print(f"kv-writer: {type(error).__name__}: {error}", flush=True)
            finally:
                with self._changed:
                    self._waiting -= job.size

    def _write(self, job: Job) -> None:
        chain = Chain(job.root)
        chain.keys = list(job.keys[: job.first + len(job.payloads)])
        first = max(job.first, self.client.there(chain.keys))  # another engine may have been first
        self.counts["there"] += first - job.first
        until = time.monotonic() + _ROOM_S
        while first < len(chain.keys) and not self._closed:
            payloads = job.payloads[first - job.first : first - job.first + _BATCH]
            handle = self.client.insert(chain, first, payloads, job.retention, job.tenant)
            puts = handle.puts if handle.wait(_PATIENCE_S) else [Put.FAILED] * len(payloads)
            good = next((n for n, put in enumerate(puts) if put not in (Put.STORED, Put.ALREADY)), len(puts))
            self.counts.update(put.value for put in puts[:good])
            first += good
            if good == len(puts):
                until = time.monotonic() + _ROOM_S
            elif puts[good] is Put.REFUSED and time.monotonic() < until:
                time.sleep(_NAP_S)  # all slots are being filled
            else:  # what follows would have no parent
                self.counts[puts[good].value] += len(chain.keys) - first
                return
