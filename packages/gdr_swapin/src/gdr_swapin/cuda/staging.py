"""Copy engines into a staging area, from where a short kernel deals each layer's bytes to the pools.

With the order "lead" a gather kernel brings the first layer ahead of the copies: slices of one layer are too small for
the copy engines' rate, and whole blocks would bring the first layer with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gdr_swapin.arena import HostArena
from gdr_swapin.cuda.base import CudaEngine
from gdr_swapin.cuda.descriptors import Descriptors
from gdr_swapin.cuda.device import Device
from gdr_swapin.cuda.gathering import launch_gather
from gdr_swapin.cuda.ring import StagingRing
from gdr_swapin.engine import Job
from gdr_swapin.options import Options
from gdr_swapin.plan import Span, spans_of
from gdr_swapin.pools import PagedPools
from kernel_core import check


@dataclass(frozen=True)
class _Parts:
    """What of a block travels together, and where each layer starts in its part: a `layer_table`."""

    spans: list[Span]
    table: np.ndarray


class StageEngine(CudaEngine):
    """One call of the compiled module queues a span of all blocks: copies, events and kernels."""

    name = "stage"

    def __init__(self, arena: HostArena, pools: PagedPools, options: Options, device: Device) -> None:
        lead = options.order == "lead" and len(pools.layout.layers) > 1
        spans = spans_of(pools.layout, "block" if options.order == "lead" else options.order)
        part_bytes = options.staging_bytes // options.staging_parts // 16 * 16
        largest = max(span.size for span in spans)
        check.require(part_bytes >= largest, "staging_bytes", options.staging_bytes,
                      f"at least {options.staging_parts} parts of {largest + 15} bytes")  # fmt: skip
        super().__init__(arena, pools, options, device)
        self._ring = StagingRing(device, part_bytes, options.staging_parts)
        self._descriptors = Descriptors(device, options.most_in_flight, pools.num_blocks)
        self._parts = self._parted(spans)
        self._led = None
        if lead:
            self._led = self._parted(spans_of(pools.layout, "first"))
            self._address = int(self.module.device_address(at=self.source.base))
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
        return 2 if options.order in ("block", "lead") else 1

    def queue(self, job: Job, held: list[Callable[[], None]]) -> Iterator[int]:
        ids = self._descriptors.acquire(job.slots, job.blocks, self.join)
        held.append(lambda: self._descriptors.release(ids.slot))
        parts = self._parts
        rest = parts.spans
        if self._led is not None and len(job.slots) >= self.options.lead_from:
            parts = self._led
            rest = parts.spans[1:]
            # The first layer starts its block at rest, so its row is the same there. Copies fill the ring meanwhile.
            launch_gather(self, self._address, ids, len(job.slots), parts.table[:1], self.join)
            yield 0
        for span in rest:
            self._move(job.slots, ids.blocks, span, parts)
            yield from range(span.first, span.end)

    def recover(self) -> None:
        self._ring.empty_behind(self.join)

    def close(self) -> None:
        super().close()
        self._ring.close()

    def _parted(self, spans: list[Span]) -> _Parts:
        layout = self.pools.layout
        within = [layout.offsets[p] - span.offset for span in spans for p in range(span.first, span.end)]
        return _Parts(spans, self.layer_table(within))

    def _move(self, slots: np.ndarray, ids: int, span: Span, parts: _Parts) -> None:
        """A span of every block through the ring."""
        rounds = self.module.stage(
            **self._fixed,
            **self._ring.arguments(len(self._turns)),
            slots=slots.ctypes.data,
            count=len(slots),
            offset=span.offset,
            size=span.size,
            ids=ids,
            layers=parts.table[span.first :].ctypes.data,
            layer_count=span.end - span.first,
        )
        self._ring.advance(rounds)
