"""One GPU a process: ranks of a host that map each other's memory by CUDA IPC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ep_comm.communicator import Moving
from ep_comm.cuda import sizes
from ep_comm.cuda.communicator import CudaCommunicator
from ep_comm.cuda.connection import Connection
from ep_comm.cuda.memory import native_shape, tensor_at
from ep_comm.cuda.store_moves import Key, StoreMoves, StoreMoving
from ep_comm.errors import Broken, Mismatch, PeerTimeout
from ep_comm.results import Transfer
from ep_comm.shape import Shape
from kernel_core.check import require
from kernel_core.cuda import cuda_module, multiprocessors


class Symmetric:
    """`size` bytes of zeros on each rank's current GPU, mapped by all. Made and closed by all ranks together."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._module, self._rank = cuda_module("ep_comm"), rank
        self._group, self.size = group, size
        self.base = self._module.allocate(bytes=size)
        handles: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(handles, self._module.export_memory(base=self.base), group=group)
        self.addresses = [
            self.base if r == rank else self._module.open_peer(handle=handle) for r, handle in enumerate(handles)
        ]
        self.tensors = [tensor_at(address, size) for address in self.addresses]

    def close(self, seconds: float) -> None:
        """Unmaps the peers' memory; the own one is freed when all have, and stays where they do not say so."""
        for r, address in enumerate(self.addresses):
            if r != self._rank:
                self._module.close_peer(base=address)
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=seconds))
        except RuntimeError:
            return
        self._module.release(base=self.base)


class PeerConnection(Connection):
    def __init__(self, group: Any, store: Any, rank: int, symmetric: Symmetric, seconds: float) -> None:
        self.memory, self.addresses = symmetric.tensors[rank], symmetric.addresses
        self._group, self._rank, self._symmetric, self._seconds = group, rank, symmetric, seconds
        self._store, self._ended = store, ""
        self._moves = StoreMoves(store, rank)
        self._gathered = 0

    def gather(self, row: torch.Tensor, epoch: int, seconds: float) -> torch.Tensor:
        """Through the store: a rank that is missing can be named."""
        if self._ended:
            raise Broken(self._ended)
        ranks, name = len(self.addresses), f"gather/{self._gathered}"
        self._gathered += 1
        self._store.set(f"{name}/{self._rank}", row.numpy().tobytes())
        rows, missing = [], []
        for r in range(ranks):
            try:
                self._store.wait([f"{name}/{r}"], timedelta(seconds=seconds))
            except RuntimeError:  # DistStoreError
                missing = [m for m in range(r, ranks) if not self._store.check([f"{name}/{m}"])]
                break
            data = bytearray(self._store.get(f"{name}/{r}"))
            rows.append(torch.frombuffer(data, dtype=torch.int64))
        if missing:
            raise PeerTimeout(self._rank, tuple(missing), "all_gather", epoch, seconds)
        if len({r.numel() for r in rows}) > 1:
            raise Mismatch(f"all_gather, epoch {epoch}: ranks bring {[r.numel() for r in rows]} values")
        # All have begun this one, so all are done with the one before the last.
        self._store.delete_key(f"gather/{self._gathered - 3}/{self._rank}")
        return torch.stack(rows)

    def move(self, transfers: Sequence[Transfer], seconds: float) -> Moving:
        return StoreMoving(self._moves, transfers, seconds)

    def under_way(self) -> set[Key]:
        return self._moves.under_way

    def end(self, reason: str) -> None:
        self._ended = self._ended or reason

    def close(self) -> None:
        self.closed = True
        self._moves.device.close()
        self._symmetric.close(self._seconds)


def peers(
    group: Any,
    shape: Shape,
    *,
    device: torch.device | None = None,
    store: Any = None,
    timeout: float = 10.0,
    ctas: int | None = None,
    fixed: bool = True,
    packed: bool = True,
) -> CudaCommunicator:
    """This process's rank of a group of processes on one host, a GPU each that the others can reach.

    group: a torch.distributed group with a CPU backend (gloo), of shape.ranks processes; its ranks are the
    communicator's. store: where transfers and small host collectives meet, the default group's without it.
    device: the current GPU without it. ctas: the most a launch has, all multiprocessors without it: fewer leave room
    for other kernels and send slower. fixed, packed: as in `virtual`.

    Made by all ranks together. Raises ValueError for sizes that kernels do not take, and Mismatch where ranks differ in
    shape; RuntimeError from CUDA where GPUs do not reach each other.
    """
    sizes.check_shape(shape)
    where = sizes.gpu("cuda" if device is None else device)
    require(timeout > 0, "timeout", timeout, "more than 0 seconds")
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    require(world == shape.ranks, "group", f"{world} processes", f"shape.ranks = {shape.ranks}")
    most = multiprocessors(where)
    require(ctas is None or 1 <= ctas <= most, "ctas", ctas, f"1 to {most}: all CTAs run at once")
    mine = (shape, fixed, packed)
    all_of_them: list[Any] = [None] * world
    dist.all_gather_object(all_of_them, mine, group=group)
    for r, other in enumerate(all_of_them):
        if other != mine:
            raise Mismatch(f"rank {rank} has {mine}, rank {r} has {other}")
    number: list[Any] = [None] * world
    dist.all_gather_object(number, _next_number(), group=group)
    base = _get_default_store() if store is None else store
    named = PrefixStore(f"ep_comm/{'-'.join(map(str, number))}", base)
    module = cuda_module("ep_comm")
    size = module.Region(native_shape(module, shape), fixed, packed).offsets()["bytes"]
    with torch.cuda.device(where):
        module.load_kernels()
        symmetric = Symmetric(group, rank, size)
        connection = PeerConnection(group, named, rank, symmetric, timeout)
        made = CudaCommunicator(
            shape, rank, where, connection, timeout=timeout, ctas=ctas or most, fixed=fixed, packed=packed
        )
        torch.cuda.synchronize(where)
    dist.barrier(group)
    return made


_made = 0


def _next_number() -> int:
    """Of this process's communicators: together with the peers' it names one."""
    global _made
    _made += 1
    return _made
