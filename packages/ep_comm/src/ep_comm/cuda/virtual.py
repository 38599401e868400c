"""Several ranks of one process on one GPU, with the kernels that ranks on several GPUs run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_comm.communicator import Moving
from ep_comm.cuda import sizes
from ep_comm.cuda.communicator import CudaCommunicator
from ep_comm.cuda.connection import Connection
from ep_comm.cuda.exchange import Exchange, ExchangeMoving, Key
from ep_comm.cuda.meeting import Meeting
from ep_comm.cuda.memory import native_shape
from ep_comm.results import Transfer
from ep_comm.shape import Shape
from kernel_core.check import require
from kernel_core.cuda import cuda_module, multiprocessors


class VirtualConnection(Connection):
    def __init__(self, rank: int, regions: list[torch.Tensor], meeting: Meeting, exchange: Exchange) -> None:
        self.memory, self.addresses = regions[rank], [r.data_ptr() for r in regions]
        self.regions = regions  # all of them stay while one rank does
        self._rank, self._meeting, self._exchange = rank, meeting, exchange
        self._moves: list[ExchangeMoving] = []

    def gather(self, row: torch.Tensor, epoch: int, seconds: float) -> torch.Tensor:
        return self._meeting.gather(self._rank, row, epoch, seconds)

    def move(self, transfers: Sequence[Transfer], seconds: float) -> Moving:
        moving = ExchangeMoving(self._exchange, self._rank, transfers, seconds)
        self._moves.append(moving)
        return moving

    def under_way(self) -> set[Key]:
        self._moves = [m for m in self._moves if m.keys]
        return {key for m in self._moves for key in m.keys}

    def end(self, reason: str) -> None:
        self._meeting.end(reason)
        self._exchange.ended = self._exchange.ended or reason

    def close(self) -> None:
        self.closed = True


def virtual(
    shape: Shape,
    device: torch.device | str = "cuda",
    *,
    timeout: float = 10.0,
    ctas: int | None = None,
    fixed: bool = True,
    packed: bool = True,
) -> list[CudaCommunicator]:
    """All ranks of a group on one GPU.

    `Together` drives them from one thread, one launch a collective. Without it each rank has a thread and a stream of
    its own; more streams than the driver's queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set) may then stand behind
    each other until the time-out. Any kernel that is loaded at its first use waits for those that run, and so would a
    rank's: use each once before, or set CUDA_MODULE_LOADING=EAGER.

    ctas: the most a rank's kernel has, 512 threads each; those of all ranks have to fit on the GPU, whose
    multiprocessors are shared out without it. fixed, packed: which forms of dispatch get buffers; fixed rows take
    ranks * max_tokens rows a rank, packed ones max_tokens.

    Raises ValueError for sizes that the kernels do not take.
    """
    sizes.check_shape(shape)
    where = sizes.gpu(device)
    require(timeout > 0, "timeout", timeout, "more than 0 seconds")
    room = multiprocessors(where) // shape.ranks
    require(ctas is None or 1 <= ctas <= room, "ctas", ctas, f"1 to {room}: all ranks' CTAs run at once")
    module = cuda_module("ep_comm")
    size = module.Region(native_shape(module, shape), fixed, packed).offsets()["bytes"]
    with torch.cuda.device(where):
        module.load_kernels()
        regions = [torch.zeros(size, dtype=torch.uint8, device=where) for _ in range(shape.ranks)]
        meeting, exchange = Meeting(shape.ranks), Exchange(where)
        ranks = [
            CudaCommunicator(
                shape, r, where, VirtualConnection(r, regions, meeting, exchange), timeout=timeout,
                ctas=ctas or room, fixed=fixed, packed=packed,
            )
            for r in range(shape.ranks)
        ]  # fmt: skip
        torch.cuda.synchronize(where)
    return ranks
