"""The public loader: checks, bookkeeping, and the one place that chooses how bytes move."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import numpy as np

from gdr_swapin.arena import HostArena
from gdr_swapin.engine import Engine, Job
from gdr_swapin.options import METHODS, Options
from gdr_swapin.plan import Ids, by_slot
from gdr_swapin.pools import PagedPools
from gdr_swapin.transfer import Busy, Transfer
from kernel_core import check


class Loader:
    """Loads blocks from a host arena into paged pools, source layer after source layer. Threads may share one.

    method: "auto", or one of
      "threads"       host memory to host memory, by threads;
      "copy"          copy engines, pieces straight into the pools;
      "stage"         copy engines into a staging area on the device, then a short kernel;
      "mixed"         "stage", while a gather kernel takes a share of the blocks;
      "gather"        a kernel of a few CTAs reads the arena with asynchronous bulk copies;
      "gather_plain"  the same with ordinary loads, as a baseline.
    All but the first need pools on a CUDA device and a pinned arena. `engine` takes a ready engine instead, such as
    `gdr_swapin.rdma.RdmaEngine`.

    Raises ValueError for an argument that does not fit, NotImplementedError for a device that has no method.
    """

    def __init__(
        self,
        arena: HostArena,
        pools: PagedPools,
        method: str = "auto",
        *,
        options: Options | None = None,
        engine: Engine | None = None,
    ) -> None:
        check.require(arena.layout.tag == pools.layout.tag, "pools", f"layout {pools.layout.tag}",
                      f"the arena's {arena.layout.tag}")  # fmt: skip
        self.arena, self.pools = arena, pools
        self.options = options or Options()
        self.engine = engine or _make(method, arena, pools, self.options)
        self._loading = np.zeros(pools.num_blocks, dtype=bool)
        self._lock = threading.Lock()
        self._queueing = threading.Lock()  # one thread at a time queues, or two jobs would mix on the streams
        self._in_flight = 0
        self._closed = False

    @property
    def method(self) -> str:
        """The way in use."""
        return self.engine.name

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        return self._in_flight

    def start(self, slots: Ids, blocks: Ids, *, after: Any = None) -> Transfer:
        """Load block `slots[i]` of the arena into page `blocks[i]` of every pool; returns at once.

        after: what used the pages until now and has to be over before they are written. On a GPU streams and events;
        by default the current stream, with all that is queued on it. Elsewhere futures, `threading.Event`s and
        callables that take a time-out; by default nothing.

        Who reads the pages calls `transfer.wait_layer` first. Slots stay leased, and pages taken, until the transfer
        has ended.

        Raises ValueError, before anything is queued, for ids out of range, page 0, a page twice or one that another
        transfer writes, slots that are not written; `Busy` with too many transfers in flight.
        """
        return self._begin(slots, blocks, after, store=False)

    def store(self, blocks: Ids, slots: Ids, *, after: Any = None) -> Transfer:
        """The way back: page `blocks[i]` of every pool into slot `slots[i]`, which becomes ready at the end.

        after: what writes the pages, as in `start`. Engines that only load raise NotImplementedError.
        """
        if not self.engine.stores:
            raise NotImplementedError(f"store has no implementation by {self.method!r}; what exists: threads, copy")
        return self._begin(slots, blocks, after, store=True)

    def close(self) -> None:
        """Wait for what is in flight and free what the loader holds."""
        with self._queueing:
            if self._closed:
                return
            self._closed = True
        self.engine.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self, slots: Ids, blocks: Ids, after: Any, *, store: bool) -> Transfer:
        sources, pages = by_slot(slots, blocks, self.arena.slots, self.pools.num_blocks, unique=store)
        self._open()
        fences = self.engine.fences(after)

        def ended(transfer: Transfer) -> None:
            self._end(transfer, sources, pages, store)

        with self._lock:
            if self._in_flight >= self.options.most_in_flight:
                raise Busy(f"{self._in_flight} transfers in flight, allowed are {self.options.most_in_flight}")
            taken = pages[self._loading[pages]]
            check.require(not len(taken), "blocks", f"{taken[:4].tolist()} of a transfer in flight", "other blocks")
            if store:
                self.arena.begin_write(sources)
            else:
                self.arena.lease(sources)
            self._loading[pages] = True
            self._in_flight += 1
        transfer = self.engine.transfer_type(self.pools.layout, len(pages), ended)
        try:
            return self._submit(Job(transfer, sources, pages, fences, store))
        except BaseException:
            transfer.end()
            raise

    def _submit(self, job: Job) -> Transfer:
        if len(job.blocks) == 0:
            for position in range(len(job.transfer.layers)):
                job.transfer.loaded(position)
            job.transfer.end()
            return job.transfer
        with self._queueing:
            self._open()
            self.engine.submit(job)
        return job.transfer

    def _open(self) -> None:
        check.require(not self._closed, "loader", "a closed one", "an open one")

    def _end(self, transfer: Transfer, slots: np.ndarray, blocks: np.ndarray, store: bool) -> None:
        if store:
            self.arena.end_write(slots, valid=not transfer.failures())
        else:
            self.arena.release(slots)
        with self._lock:
            self._loading[blocks] = False
            self._in_flight -= 1


def _make(method: str, arena: HostArena, pools: PagedPools, options: Options) -> Engine:
    check.require(method in ("auto", *METHODS), "method", repr(method), f"auto, {', '.join(METHODS)}")
    if pools.device.type == "cpu":
        check.require(method in ("auto", "threads"), "method", repr(method), "'auto' or 'threads' on the host")
        from gdr_swapin.threads import ThreadsEngine

        return ThreadsEngine(arena, pools, threads=options.threads)
    if pools.device.type != "cuda":
        raise NotImplementedError(
            f"Loader has no implementation for device '{pools.device}'; what exists: cpu and cuda"
        )
    check.require(method != "threads", "method", repr(method), "a method for pools on a GPU")
    check.require(arena.pinned, "arena", "memory that is not pinned", "a pinned arena: HostArena.register()")
    from gdr_swapin.cuda import make_engine

    return make_engine("stage" if method == "auto" else method, arena, pools, options)
