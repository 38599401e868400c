"""One process of several, a GPU each: its peers, and times that are those of the slowest rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kernel_core.bench import Timing
from kernel_core.bench.cuda import CudaClock

_WARM_UPS = 3
MARK = "EP "  # begins a line of rank 0 that the parent reads


class Group:
    """Attributes: rank, world, gloo (for messages of the host). NCCL has the default group's CUDA tensors.

    meet: host and port of this machine where the ranks find each other.
    """

    def __init__(self, rank: int, world: int, meet: str, seconds: float = 120.0) -> None:
        torch.cuda.set_device(rank)
        self.rank, self.world = rank, world
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"tcp://{meet}", rank=rank, world_size=world,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        self.gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._clock: CudaClock | None = None

    def gather(self, value: Any) -> list[Any]:
        """Of all ranks, in their order."""
        everything: list[Any] = [None] * self.world
        dist.all_gather_object(everything, value, group=self.gloo)
        return everything

    def meet(self) -> None:
        dist.barrier(self.gloo)

    def tell(self, **message: Any) -> None:
        """Rank 0 to the parent: `row` is a ledger row, `say` a line for people."""
        if self.rank == 0:
            print(MARK + json.dumps(message, allow_nan=False), flush=True)

    def time(
        self, calls: Mapping[str, Callable[[], object]], ready: Callable[[], object], runs: int = 30
    ) -> dict[str, Timing]:
        """Calls take turns. `ready` lines the ranks up on their devices; a sample is that of the slowest rank.

        The host launches while the device spins, so that events enclose the work alone; a call that waits for the host
        in its midst has that wait in its time, as in use.
        """
        if self._clock is None:
            self._clock = CudaClock()
        clock = self._clock
        for call in calls.values():
            for _ in range(_WARM_UPS):
                ready()
                call()
        clock.synchronize()
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(runs):
            for name, call in calls.items():
                self.meet()
                clock.flush()
                clock.spin()
                ready()
                start = clock.mark()
                call()
                stop = clock.mark()
                clock.synchronize()
                samples[name].append(clock.microseconds(start, stop))
        everybody = self.gather(samples)
        return {name: Timing.of([max(of) for of in zip(*(e[name] for e in everybody), strict=True)]) for name in calls}

    def close(self) -> None:
        self.meet()
        dist.destroy_process_group()


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The same from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay
