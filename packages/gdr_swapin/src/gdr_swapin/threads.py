"""The CPU's way: threads that copy, layer by layer."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gdr_swapin.arena import HostArena
from gdr_swapin.engine import Job, host_fences, pass_fence
from gdr_swapin.native import native
from gdr_swapin.plan import Copies, layer_copies
from gdr_swapin.pools import PagedPools
from gdr_swapin.transfer import Transfer

_FENCE_S = 60.0


def copy_pieces(copies: Copies) -> None:
    """One thread's share, without the interpreter lock."""
    native.copy_pieces(**copies.arguments())


class ThreadsEngine:
    """One thread takes jobs in their order and waits for their fences; it and `threads - 1` more copy each layer."""

    name = "threads"
    stores = True
    transfer_type = Transfer

    def __init__(
        self,
        arena: HostArena,
        pools: PagedPools,
        *,
        threads: int = 2,
        fence_s: float = _FENCE_S,
        copy: Callable[[Copies], None] = copy_pieces,
    ) -> None:
        self._arena, self._pools, self._copy, self._fence_s = arena, pools, copy, fence_s
        self._threads = threads
        self._helpers = ThreadPoolExecutor(threads - 1, "swapin-copy") if threads > 1 else None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="swapin", daemon=True)
        self._worker.start()

    def fences(self, after: Any) -> tuple[Any, ...]:
        return host_fences(after)

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._worker.join()
        if self._helpers is not None:
            self._helpers.shutdown()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            position = 0
            try:
                for fence in job.fences:
                    pass_fence(fence, self._fence_s)
                for position in range(len(self._pools.layout.layers)):
                    self._move(self._copies(job, position))
                    job.transfer.loaded(position)
            except Exception as error:  # whatever it was, the layer is not there
                job.transfer.failed(position, f"{type(error).__name__}: {error}")
            job.transfer.end()

    def _copies(self, job: Job, position: int) -> Copies:
        copies = layer_copies(self._arena.source, job.slots, self._pools, job.blocks, position)
        return copies.reversed() if job.store else copies

    def _move(self, copies: Copies) -> None:
        shares = split(copies, self._threads)
        others = [self._helpers.submit(self._copy, share) for share in shares[1:]] if self._helpers else []
        try:
            self._copy(shares[0])
        finally:
            errors = [error for other in others if (error := other.exception())]  # all have to be over in any case
        if errors:
            raise errors[0]


def split(copies: Copies, parts: int) -> list[Copies]:
    """In `parts` shares of about the same number of bytes; some may be empty."""
    if parts == 1 or len(copies) < 2:
        return [copies] + [copies.part(0, 0)] * (parts - 1)
    ends = np.cumsum(copies.sizes)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts, side="left") + 1
    bounds = [0, *np.minimum(cuts, len(copies)).tolist(), len(copies)]
    return [copies.part(start, end) for start, end in itertools.pairwise(bounds)]
