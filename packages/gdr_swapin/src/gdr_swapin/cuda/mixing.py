"""Copy engines for most blocks and a gather kernel for the rest, at the same time: each fills the gaps of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gdr_swapin.arena import HostArena
from gdr_swapin.cuda.device import Device
from gdr_swapin.cuda.gathering import launch_gather
from gdr_swapin.cuda.staging import StageEngine
from gdr_swapin.engine import Job
from gdr_swapin.options import Options
from gdr_swapin.pools import PagedPools


class MixedEngine(StageEngine):
    """As "stage", but the last `gather_share` of the blocks is read by `ctas` CTAs."""

    name = "mixed"

    def __init__(self, arena: HostArena, pools: PagedPools, options: Options, device: Device) -> None:
        if options.order == "lead":
            options = replace(options, order="block")
        super().__init__(arena, pools, options, device)
        self._address = int(self.module.device_address(at=self.source.base))
        self._at_rest = self.layer_table(pools.layout.offsets)
        self._side = device.stream()
        self.streams.append(self._side)  # fences and ends count for it too; copies take turns on the others

    def queue(self, job: Job, held: list[Callable[[], None]]) -> Iterator[int]:
        ids = self._descriptors.acquire(job.slots, job.blocks, self.join)
        held.append(lambda: self._descriptors.release(ids.slot))
        self._side.wait_event(self._mark(self.join))  # behind the ids' upload
        staged = len(job.slots) - round(len(job.slots) * self.options.gather_share)
        rest = ids.behind(staged)
        for span in self._parts.spans:
            for position in range(span.first, span.end):
                table = self._at_rest[position : position + 1]
                count = len(job.slots) - staged
                launch_gather(self, self._address, rest, count, table, self._side)
            self._move(job.slots[:staged], ids.blocks, span, self._parts)
            self.join.wait_event(self._mark(self._side))
            yield from range(span.first, span.end)
