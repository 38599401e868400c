"""Copy engines into a staging area, from where a short kernel deals each layer's bytes to the pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gdr_swapin.arena import HostArena
from gdr_swapin.cuda.base import CudaEngine
from gdr_swapin.cuda.descriptors import Descriptors
from gdr_swapin.cuda.device import Device
from gdr_swapin.cuda.ring import StagingRing
from gdr_swapin.engine import Job
from gdr_swapin.options import Options
from gdr_swapin.plan import Span, spans_of
from gdr_swapin.pools import PagedPools
from kernel_core import check


class StageEngine(CudaEngine):
    """One call of the compiled module queues a span of all blocks: copies, events and kernels."""

    name = "stage"

    def __init__(self, arena: HostArena, pools: PagedPools, options: Options, device: Device) -> None:
        layout = pools.layout
        self._spans = spans_of(layout, options.order)
        part_bytes = options.staging_bytes // options.staging_parts // 16 * 16
        largest = max(span.size for span in self._spans)
        check.require(part_bytes >= largest, "staging_bytes", options.staging_bytes,
                      f"at least {options.staging_parts} parts of {largest + 15} bytes")  # fmt: skip
        super().__init__(arena, pools, options, device)
        self._ring = StagingRing(device, part_bytes, options.staging_parts)
        self._descriptors = Descriptors(device, options.most_in_flight, pools.num_blocks)
        within = [0] * len(layout.layers)
        for span in self._spans:
            for position in range(span.first, span.end):
                within[position] = layout.offsets[position] - span.offset
        self._table = self.layer_table(within)
        self._turns = np.array([stream.cuda_stream for stream in self.streams], dtype=np.uint64)
        self._fixed = {
            "source": self.source.base,
            "stride": self.source.stride,
            "first": options.first_blocks,
            "per_call": options.pieces_a_call,
            "regular_from": options.regular_from,
            "batched": self._batched,
            "any_order": options.any_order,
            "prefer_overlap": options.prefer_overlap,
            "streams": self._turns.ctypes.data,
            "stream_count": len(self._turns),
            "join": self.join.cuda_stream,
            "piece": options.piece_bytes,
            "ctas": options.scatter_ctas,
            "loads": options.scatter_loads,
            "stages": options.stages,
        }

    @staticmethod
    def own_streams(options: Options) -> int:
        """Two for whole blocks; smaller pieces on several streams are slower than on one."""
        return 2 if options.order == "block" else 1

    def queue(self, job: Job, held: list[Callable[[], None]]) -> Iterator[int]:
        ids = self._descriptors.acquire(job.slots, job.blocks, self.join)
        held.append(lambda: self._descriptors.release(ids.slot))
        for span in self._spans:
            self._move(job.slots, ids.blocks, span)
            yield from range(span.first, span.end)

    def recover(self) -> None:
        self._ring.empty_behind(self.join)

    def close(self) -> None:
        super().close()
        self._ring.close()

    def _move(self, slots: np.ndarray, ids: int, span: Span) -> None:
        """A span of every block through the ring."""
        rounds = self.module.stage(
            **self._fixed,
            **self._ring.arguments(len(self._turns)),
            slots=slots.ctypes.data,
            count=len(slots),
            offset=span.offset,
            size=span.size,
            ids=ids,
            layers=self._table[span.first :].ctypes.data,
            layer_count=span.end - span.first,
        )
        self._ring.advance(rounds)
