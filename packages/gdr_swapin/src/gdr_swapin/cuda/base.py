"""What the ways to load on a GPU share: streams, fences, one event a layer, and the end of a transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gdr_swapin.arena import HostArena
from gdr_swapin.cuda.device import Device
from gdr_swapin.cuda.transfer import CudaTransfer
from gdr_swapin.cuda.watcher import Watched, Watcher
from gdr_swapin.engine import Job
from gdr_swapin.options import Options
from gdr_swapin.pairing import paired
from gdr_swapin.plan import Copies
from gdr_swapin.pools import PagedPools
from gdr_swapin.transfer import Transfer


class CudaEngine:
    """Copies go to `streams`, in turn; `join` runs behind them, and each layer's event is recorded there.

    Nothing here waits for the device, save `close`.
    """

    name = "cuda"
    stores = False
    transfer_type: type[Transfer] = CudaTransfer

    def __init__(self, arena: HostArena, pools: PagedPools, options: Options, device: Device) -> None:
        self.arena, self.pools, self.options, self.device = arena, pools, options, device
        self.module = device.module
        self.source = arena.source
        self._turns_of = options.streams or self.own_streams(options)
        self.streams = [device.stream() for _ in range(self._turns_of)]
        self.join = device.stream()
        self.behind: Any = self.join
        self._turn = 0
        self._batched = options.batched and bool(self.module.has_batch())
        self._watcher = Watcher(device.enter)

    @staticmethod
    def own_streams(options: Options) -> int:
        """Copy streams where `Options.streams` names no number."""
        return 1

    def queue(self, job: Job, held: list[Callable[[], None]]) -> Iterator[int]:
        """Queue the layers, yielding each position when `behind`, which is `join` if not set otherwise, runs behind it.

        What has to be given back once the transfer is over goes to `held`.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """After a layer that could not be queued: nothing of it is under way once `join` has come this far."""

    def fences(self, after: Any) -> tuple[Any, ...]:
        """Events; of a stream, one recorded now. By default of the current stream, so that its work is over before."""
        if after is None:
            after = self.device.current_stream()
        items = tuple(after) if isinstance(after, Iterable) else (after,)
        events = []
        for item in items:
            if callable(getattr(item, "wait_event", None)):
                events.append(self._mark(item))
            elif callable(getattr(item, "record", None)):
                events.append(item)
            else:
                raise ValueError(f"after: got {type(item).__name__}, allowed are streams and events")
        return tuple(events)

    def submit(self, job: Job) -> None:
        transfer = job.transfer
        assert isinstance(transfer, CudaTransfer)
        transfer.events = [None] * len(transfer.layers)
        transfer.current_stream = self.device.current_stream
        held: list[Callable[[], None]] = []
        queued: list[tuple[int, Any]] = []
        failed = 0
        with self.device.active():
            for stream in (*self.streams, self.join):
                for fence in job.fences:
                    stream.wait_event(fence)
            self.behind = self.join
            try:
                for position in self.queue(job, held):
                    event = self._mark(self.behind)
                    transfer.events[position] = event
                    queued.append((position, event))
                    failed = position + 1
            except Exception as error:  # the layers before have their events, this one and the rest have none
                transfer.failed(failed, f"{type(error).__name__}: {error}")
            self.catch_up()  # a failed layer's first pieces may be under way
            last = self._mark(self.join)
            if len(queued) < len(transfer.layers):
                self.recover()
        self._watcher.watch(Watched(transfer, queued, last, held))

    def close(self) -> None:
        self._watcher.close()

    # For the engines.

    def catch_up(self) -> None:
        """`join` runs behind everything queued on the copy streams until now."""
        for stream in self.streams:
            self.join.wait_event(self._mark(stream))

    def next_stream(self) -> Any:
        self._turn = (self._turn + 1) % self._turns_of
        return self.streams[self._turn]

    def copy(self, copies: Copies, stream: Any, *, store: bool = False) -> None:
        """Queue pieces on a copy stream. Arena slots are leased, so their bytes may be read in any order."""
        if self._batched:
            how = {
                "per_call": self.options.pieces_a_call,
                "any_order": self.options.any_order and not store,
                "prefer_overlap": self.options.prefer_overlap,
                "stream": stream.cuda_stream,
            }
            if self.options.paired:
                pairs, copies = paired(copies)
                if len(pairs):
                    self.module.copy_strided(**pairs.arguments(), **how)
            if len(copies):
                self.module.copy_batch(**copies.arguments(), **how)
        elif len(copies):
            self.module.copy_each(**copies.arguments(), stream=stream.cuda_stream)

    def layer_table(self, offsets: Iterable[int]) -> np.ndarray:
        """What kernels are told of the layers: `uint64[layers, 5]`."""
        layers, pools = self.pools.layout.layers, self.pools
        rows = [
            (offset, s.index_bytes, s.main_bytes, pools.index[i].data_ptr(), pools.main[i].data_ptr())
            for i, (s, offset) in enumerate(zip(layers, offsets, strict=True))
        ]
        return np.array(rows, dtype=np.uint64)

    def _mark(self, stream: Any) -> Any:
        event = self.device.event()
        event.record(stream)
        return event
