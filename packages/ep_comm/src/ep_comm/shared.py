"""Constructors of ranks that share memory."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ep_comm.communicator import Communicator
from ep_comm.errors import Mismatch
from ep_comm.memory_end import MemoryCommunicator
from ep_comm.native import native, native_shape
from ep_comm.shape import Shape
from kernel_core.check import require

TIMEOUT = 30.0


def threads(shape: Shape, timeout: float = TIMEOUT) -> list[Communicator]:
    """All ranks of a group in this process, each to be used by a thread of its own.

    timeout: seconds that any wait lasts at most.

    Raises:
        ValueError: `timeout` is not above 0.
    """
    check_timeout(timeout)
    sizes = native_shape(shape)
    memory = native.private_memory(sizes)
    ends = [native.End(memory, sizes, rank) for rank in range(shape.ranks)]
    for end in ends:
        end.claim()
        end.enter(timeout)
    return [MemoryCommunicator(shape, rank, timeout, end) for rank, end in enumerate(ends)]


def shared_memory(path: str | os.PathLike[str], rank: int, shape: Shape, timeout: float = TIMEOUT) -> Communicator:
    """One rank of a group of processes on one host, which meet at a file.

    path: the same for all ranks and new for each group, best in /dev/shm. Whoever comes first makes the file; it is
        removed when all ranks have come, or one fails here. Memory lives until the last rank has closed.
    timeout: seconds that any wait lasts at most, that for the other ranks here too.

    Raises:
        ValueError: `rank` is outside of the group or taken; the file is no region of this package.
        Mismatch: peers at this path have another shape.
        PeerTimeout, Broken: a peer did not come, or is gone.
        OSError: the file cannot be made; too little memory.
    """
    check_timeout(timeout)
    require(isinstance(rank, int) and 0 <= rank < shape.ranks, "rank", rank, f"0 to {shape.ranks - 1}")
    sizes = native_shape(shape)
    memory = native.file_memory(os.fspath(path), sizes)
    if isinstance(memory, str):
        raise Mismatch(memory)
    end = native.End(memory, sizes, rank)
    if end.claim():
        _remove(Path(path), memory)  # before peers can see that all have come, and begin another group here
    end.enter(timeout)
    comm = MemoryCommunicator(shape, rank, timeout, end)
    try:
        comm.join()
    except BaseException:
        comm.close()
        _remove(Path(path), memory)
        raise
    return comm


def check_timeout(timeout: float) -> None:
    require(timeout > 0 and math.isfinite(timeout), "timeout", timeout, "seconds above 0")


def _remove(path: Path, memory: object) -> None:
    """The file, if it still is the one that `memory` maps."""
    try:
        status = path.stat()
        if memory.is_file(status.st_dev, status.st_ino):  # type: ignore[attr-defined]
            path.unlink()
    except FileNotFoundError:
        pass  # a peer was faster
