"""Loads by a queue pair: deadline order, bounded depth, a time-out, and no answer from a failed request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gdr_swapin.arena import HostArena
from gdr_swapin.engine import Job, host_fences, pass_fence
from gdr_swapin.plan import layer_copies
from gdr_swapin.pools import PagedPools
from gdr_swapin.rdma.ledger import LayerLedger
from gdr_swapin.rdma.queue_pair import Completion, QueuePair
from gdr_swapin.transfer import Transfer

_POLL = 64
_PAUSE_S = 20e-6  # between polls that find nothing


class RdmaEngine:
    """One thread posts and polls, one job after the other.

    A card writes memory past every stream, so fences are waited for before the first request is posted. A job that goes
    on for `timeout_s` without a completion fails; its queue is reset before its blocks are given back, because a late
    request would write into blocks of somebody else.
    """

    name = "rdma"
    stores = True
    transfer_type = Transfer

    def __init__(
        self,
        arena: HostArena,
        pools: PagedPools,
        queue_pair: QueuePair,
        *,
        timeout_s: float = 1.0,
        fence_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._arena, self._pools, self._queue = arena, pools, queue_pair
        self._timeout_s, self._fence_s, self._clock, self._pause = timeout_s, fence_s, clock, pause
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._next_id = 0
        self.strays = 0  # completions of requests of earlier jobs
        self._thread = threading.Thread(target=self._run, name="swapin-rdma", daemon=True)
        self._thread.start()

    def fences(self, after: Any) -> tuple[Any, ...]:
        return host_fences(after)

    def submit(self, job: Job) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                for fence in job.fences:
                    pass_fence(fence, self._fence_s)
                self._move(job)
            except Exception as error:  # a fence, or the queue itself
                job.transfer.failed(0, f"{type(error).__name__}: {error}")
            job.transfer.end()

    def _move(self, job: Job) -> None:
        layers = []
        for position in range(len(self._pools.layout.layers)):
            copies = layer_copies(self._arena.source, job.slots, self._pools, job.blocks, position)
            layers.append(copies.reversed() if job.store else copies)
        first = self._next_id
        ledger = LayerLedger(layers, first)
        self._next_id = ledger.end_id
        told = 0
        last = self._clock()
        try:
            while not (ledger.settled and ledger.outstanding == 0):
                self._post(ledger)
                found = self._queue.poll(_POLL)
                for completion in found:
                    self._take(ledger, completion, first)
                while told < ledger.arrived:
                    job.transfer.loaded(told)
                    told += 1
                if ledger.failure is not None:
                    job.transfer.failed(*ledger.failure)
                if found:
                    last = self._clock()
                elif self._clock() - last >= self._timeout_s:
                    ledger.fail(ledger.arrived, f"no completion for {self._timeout_s:g} s")
                    break
                else:
                    self._pause(_PAUSE_S)
        finally:
            if ledger.outstanding or ledger.failure is not None:
                self._queue.reset()
                ledger.abandon()
        if ledger.failure is not None:
            job.transfer.failed(*ledger.failure)

    def _post(self, ledger: LayerLedger) -> None:
        batch = ledger.to_post(self._queue.depth - ledger.outstanding)
        if not batch:
            return
        try:
            self._queue.post(batch)
        except Exception as error:  # none of the batch was posted
            ledger.not_posted(batch, f"{type(error).__name__}: {error}")

    def _take(self, ledger: LayerLedger, completion: Completion, first: int) -> None:
        if completion.id < first:
            self.strays += 1  # an earlier job's, whose queue was reset
        else:
            ledger.complete(completion)
