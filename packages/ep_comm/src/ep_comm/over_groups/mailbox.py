"""What peers have sent for collectives, and waits for it that say who is missing."""

from __future__ import annotations

import threading
import time

import torch

from ep_comm.errors import Broken, CommError, Mismatch, PeerTimeout

_SLICE = 0.1  # seconds after which a wait looks at signals
KINDS = ("none", "dispatch", "combine", "barrier", "all_gather", "join")


def stamp(epoch: int, kind: str, detail: int) -> int:
    """As `stamp` of layout.hpp."""
    return epoch << 24 | KINDS.index(kind) << 16 | detail


def name_of(flag: int) -> str:
    number, detail = flag >> 16 & 0xFF, flag & 0xFFFF
    kind = KINDS[number] if number < len(KINDS) else f"collective {number}"
    if kind == "combine":
        return "combine of ranks" if detail else "combine of slots"
    return f"all_gather of {detail + 1} values" if kind == "all_gather" else kind


class Mailbox:
    """Of one rank. Peers are at most one epoch ahead, so two epochs' parts are kept."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self.changed = threading.Condition(threading.RLock())
        self._parts: dict[int, dict[int, tuple[int, torch.Tensor]]] = {}
        self.gone: dict[int, str] = {}  # peers that will send no more, and why
        self._aborted: CommError | None = None  # what all waits end with

    def put(self, peer: int, epoch: int, flag: int, payload: torch.Tensor) -> None:
        with self.changed:
            self._parts.setdefault(epoch, {})[peer] = (flag, payload)
            self.changed.notify_all()

    def leave(self, peer: int, why: str) -> None:
        with self.changed:
            self.gone.setdefault(peer, why)
            self.changed.notify_all()

    def end(self, peer: int, error: CommError) -> None:
        """`peer` has failed, and with it all that wait."""
        with self.changed:
            self._aborted = self._aborted or error
            self.leave(peer, str(error))

    def take(self, epoch: int, flag: int, timeout: float) -> dict[int, torch.Tensor]:
        """All peers' parts of a collective."""
        deadline = time.monotonic() + timeout
        with self.changed:
            parts = self._parts.setdefault(epoch, {})
            while True:
                failure = self._look(epoch, flag, parts)
                if failure is not None:
                    raise failure
                missing = self._missing(parts)
                if not missing:
                    del self._parts[epoch]
                    return {peer: payload for peer, (_, payload) in parts.items()}
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerTimeout(self._rank, missing, KINDS[flag >> 16 & 0xFF], epoch, timeout)
                self.changed.wait(min(left, _SLICE))

    def _missing(self, parts: dict[int, tuple[int, torch.Tensor]]) -> tuple[int, ...]:
        return tuple(peer for peer in range(self._ranks) if peer != self._rank and peer not in parts)

    def _look(self, epoch: int, flag: int, parts: dict[int, tuple[int, torch.Tensor]]) -> CommError | None:
        for peer, (theirs, _) in sorted(parts.items()):
            if theirs != flag:
                both = f"rank {peer} is in {name_of(theirs)}, rank {self._rank} in {name_of(flag)}"
                return Mismatch(f"{both}, both at epoch {epoch}")
        missing = self._missing(parts)
        if missing and self._aborted is not None:
            return self._aborted
        reasons = [self.gone[peer] for peer in missing if peer in self.gone]
        return Broken(reasons[0]) if reasons else None
