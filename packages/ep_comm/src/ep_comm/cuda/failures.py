"""What a kernel reports, as an exception."""

from __future__ import annotations

import struct

import torch

from ep_comm.errors import Broken, CommError, Mismatch, PeerTimeout

_REPORT = struct.Struct("<iiQQQ")  # state, kind, epoch, missing, seen: collectives.hpp, Report
BYTES = _REPORT.size
_KINDS = ("nothing", "dispatch", "combine", "barrier", "all_gather", "join")
_TIMEOUT, _MISMATCH, _ENDED = 1, 2, 3
_WHY = {1: "aborted", 2: "closed its communicator", 3: "had waited too long", 4: "was in another collective"}
ABORTED, CLOSED = 1, 2


def ended_word(why: int, rank: int) -> int:
    """What `Control::ended` holds after rank `rank` gave up."""
    return why | rank << 8


def failure(memory: torch.Tensor, rank: int, seconds: float) -> CommError | None:
    """From a rank's report (uint8 in pinned memory), None while there is none. Never waits."""
    state, kind, epoch, missing, seen = _REPORT.unpack(memory.numpy()[:BYTES].tobytes())
    if state == 0:
        return None
    ranks = tuple(r for r in range(64) if missing >> r & 1)
    if state == _TIMEOUT:
        return PeerTimeout(rank, ranks, _kind(kind), epoch, seconds)
    if state == _MISMATCH:
        who = ", ".join(map(str, ranks))
        other = f"{_kind(seen >> 16 & 0xFF)} (form {seen & 0xFFFF})"
        return Mismatch(f"rank {rank} is in {_kind(kind)}, epoch {epoch}; rank {who} is in {other} at the same epoch")
    why = _WHY.get(seen & 0xFF, "ended")
    return Broken(f"rank {seen >> 8} {why} while rank {rank} was in {_kind(kind)}, epoch {epoch}")


def _kind(number: int) -> str:
    return _KINDS[number] if 0 <= number < len(_KINDS) else f"kind {number}"
