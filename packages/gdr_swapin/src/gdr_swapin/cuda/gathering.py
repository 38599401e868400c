"""A kernel of a few CTAs that reads the pinned arena over the link, a launch a layer."""

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
from gdr_swapin.pools import PagedPools


def launch_gather(
    engine: CudaEngine, address: int, ids: Ids, count: int, table: np.ndarray, stream: Any, *, plain: bool = False
) -> None:
    """Queue the kernel for one layer, a row of `layer_table`, of `count` blocks of the arena at a device address."""
    options = engine.options
    common = {
        "source": address,
        "stride": engine.source.stride,
        "slots": ids.slots,
        "blocks": ids.blocks,
        "count": count,
        "layers": table.ctypes.data,
        "layer_count": 1,
        "ctas": options.ctas,
        "stream": stream.cuda_stream,
    }
    if plain:
        slice_bytes = int(table[0, 1] + table[0, 2])
        engine.module.move_plain(**common, piece=slice_bytes, loads=options.loads)
    else:
        engine.module.move_bulk(**common, piece=options.piece_bytes, stages=options.stages)


class GatherEngine(CudaEngine):
    """plain: ordinary loads, the baseline; otherwise asynchronous bulk copies through shared memory."""

    def __init__(
        self, arena: HostArena, pools: PagedPools, options: Options, device: Device, *, plain: bool = False
    ) -> None:
        super().__init__(arena, pools, options, device)
        self.name = "gather_plain" if plain else "gather"
        self._plain = plain
        self._address = int(self.module.device_address(at=self.source.base))
        self._descriptors = Descriptors(device, options.most_in_flight, pools.num_blocks)
        self._table = self.layer_table(pools.layout.offsets)

    def queue(self, job: Job, held: list[Callable[[], None]]) -> Iterator[int]:
        ids = self._descriptors.acquire(job.slots, job.blocks, self.join)
        held.append(lambda: self._descriptors.release(ids.slot))
        for position in range(len(self._table)):
            row = self._table[position : position + 1]
            launch_gather(self, self._address, ids, len(job.slots), row, self.join, plain=self._plain)
            yield position
