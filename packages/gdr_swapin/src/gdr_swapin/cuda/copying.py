"""Copy engines straight into the pools: two pieces a block and layer, or a strided copy where ids run in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gdr_swapin.arena import HostArena
from gdr_swapin.cuda.base import CudaEngine
from gdr_swapin.cuda.device import Device
from gdr_swapin.engine import Job
from gdr_swapin.options import Options
from gdr_swapin.pairing import pairing_order
from gdr_swapin.plan import joined, layer_parts, regular_runs
from gdr_swapin.pools import PagedPools
from kernel_core import check


class CopyEngine(CudaEngine):
    """No multiprocessor is used. Small pieces keep the engines from the link's rate; see the README's figures."""

    name = "copy"
    stores = True

    def __init__(self, arena: HostArena, pools: PagedPools, options: Options, device: Device) -> None:
        # Batches of pieces on four streams went wrong on a device, and are slower there than on one.
        batched = options.batched and bool(device.module.has_batch())
        check.require(options.streams <= 1 or not batched, "streams", options.streams,
                      "0 or 1 for batched copies of pieces")  # fmt: skip
        super().__init__(arena, pools, options, device)

    def queue(self, job: Job, held: list[Callable[[], None]]) -> Iterator[int]:
        fewest = self.options.regular_from
        if fewest:
            runs, alone = regular_runs(job.slots, job.blocks, fewest)
        else:
            runs, alone = [], np.ones(len(job.slots), dtype=bool)
        slots, blocks = job.slots[alone], job.blocks[alone]
        if self.options.paired:
            order = pairing_order(slots, blocks)
            slots, blocks = slots[order], blocks[order]
        for position in range(len(self.pools.layout.layers)):
            for start, length in runs:
                self._strided(job, start, length, position, self.next_stream())
            parts = layer_parts(self.source, slots, self.pools, blocks, position)
            # One list and so one call a layer; but pairs would not stay pairs where their number is odd.
            for copies in parts if self.options.paired else (joined(*parts),):
                for part in (copies.reversed() if job.store else copies).cut(self.options.pieces_a_call):
                    self.copy(part, self.next_stream(), store=job.store)
            self.catch_up()
            yield position

    def _strided(self, job: Job, start: int, length: int, position: int, stream: Any) -> None:
        layout, pools = self.pools.layout, self.pools
        source = layout.layers[position]
        at = int(self.source.at(job.slots[start : start + 1], layout.offsets[position])[0])
        block = int(job.blocks[start])
        for tensor, size, skip in (
            (pools.index[position], source.index_bytes, 0),
            (pools.main[position], source.main_bytes, source.index_bytes),
        ):
            rest, page = (at + skip, self.source.stride), (tensor.data_ptr() + block * size, size)
            to, from_ = (rest, page) if job.store else (page, rest)
            self.module.copy_rows(to=to[0], to_pitch=to[1], from_=from_[0], from_pitch=from_[1], width=size,
                                  rows=length, stream=stream.cuda_stream)  # fmt: skip
