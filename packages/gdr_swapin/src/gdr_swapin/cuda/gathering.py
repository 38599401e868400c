"""A kernel of a few CTAs that reads the pinned arena over the link: a launch a layer, or one launch for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gdr_swapin.arena import HostArena
from gdr_swapin.cuda.base import CudaEngine
from gdr_swapin.cuda.descriptors import Descriptors, Ids
from gdr_swapin.cuda.device import Device
from gdr_swapin.engine import Job
from gdr_swapin.options import Options
from gdr_swapin.plan import spans_of
from gdr_swapin.pools import PagedPools


def launch_gather(
    engine: CudaEngine,
    address: int,
    ids: Ids,
    count: int,
    table: np.ndarray,
    stream: Any,
    *,
    plain: bool = False,
    group_ends: int = 0,
    done: int = 0,
) -> None:
    """Queue the kernel for `count` blocks of the arena at a device address and layers, rows of `layer_table`.

    group_ends, done: see `move_slices.hpp`; the plain kernel has neither.
    """
    options = engine.options
    common = {
        "source": address,
        "stride": engine.source.stride,
        "slots": ids.slots,
        "blocks": ids.blocks,
        "count": count,
        "layers": table.ctypes.data,
        "layer_count": len(table),
        "ctas": options.ctas,
        "stream": stream.cuda_stream,
    }
    if plain:
        slice_bytes = int(table[0, 1] + table[0, 2])
        engine.module.move_plain(**common, piece=slice_bytes, loads=options.loads)
    else:
        engine.module.move_bulk(**common, piece=options.piece_bytes, stages=options.stages, group_ends=group_ends,
                                done=done, stream_once=options.stream_once)  # fmt: skip


class GatherEngine(CudaEngine):
    """plain: ordinary loads, the baseline; otherwise asynchronous bulk copies through shared memory.

    In one launch the CTAs count what they have finished, layer by layer, in memory of their own, and a stream that
    waits for the counter carries the layer's event: the ring never runs empty between two layers.
    """

    def __init__(
        self, arena: HostArena, pools: PagedPools, options: Options, device: Device, *, plain: bool = False
    ) -> None:
        super().__init__(arena, pools, options, device)
        self.name = "gather_plain" if plain else "gather"
        self._plain = plain
        self._address = int(self.module.device_address(at=self.source.base))
        self._descriptors = Descriptors(device, options.most_in_flight, pools.num_blocks)
        self._table = self.layer_table(pools.layout.offsets)
        self._groups = spans_of(pools.layout, options.gather_order)
        self._once = options.one_launch and not plain and bool(self.module.has_wait_value())
        if self._once:
            self._told = device.stream()
            self._done = device.zeros(options.most_in_flight, len(self._groups))
            self._launches = [0] * options.most_in_flight

    @staticmethod
    def own_streams(options: Options) -> int:
        """No copy engine takes part."""
        return 0

    def queue(self, job: Job, held: list[Callable[[], None]]) -> Iterator[int]:
        ids = self._descriptors.acquire(job.slots, job.blocks, self.join)
        held.append(lambda: self._descriptors.release(ids.slot))
        if self._once:
            yield from self._in_one(job, ids)
            return
        for position in range(len(self._table)):
            row = self._table[position : position + 1]
            launch_gather(self, self._address, ids, len(job.slots), row, self.join, plain=self._plain)
            yield position

    def _in_one(self, job: Job, ids: Ids) -> Iterator[int]:
        """The kernel first, then the waits for its counters: a wait that nothing ends would hold its stream for ever.

        Counters are never set back. A buffer of ids has its own, and its last kernel is over before it is used again.
        """
        done = self._done.data_ptr() + 4 * len(self._groups) * ids.slot
        ends = sum(1 << (group.end - 1) for group in self._groups)
        launch_gather(self, self._address, ids, len(job.slots), self._table, self.join, group_ends=ends, done=done)
        self._launches[ids.slot] += 1
        value = self._launches[ids.slot] * self.options.ctas % (1 << 32)
        for number, group in enumerate(self._groups[:-1]):
            self.module.wait_value(counter=done + 4 * number, value=value, stream=self._told.cuda_stream)
            self.behind = self._told
            yield from range(group.first, group.end)
        self.behind = self.join
        yield from range(self._groups[-1].first, self._groups[-1].end)
