"""Ranks of one process that exchange a few numbers on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ep_comm.errors import Broken, Mismatch, PeerTimeout

Gather = Callable[[torch.Tensor, int, float], torch.Tensor]  # row, epoch, seconds


@dataclass
class _Turn:
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    left: int = 0


class Meeting:
    """Each rank's thread calls `gather` as often as the others."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._next = [0] * ranks
        self._turns: dict[int, _Turn] = {}
        self._ended = ""

    def gather(self, rank: int, row: torch.Tensor, epoch: int, seconds: float) -> torch.Tensor:
        """int64 [ranks, n]."""
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            turn = self._turns.setdefault(number, _Turn())
            turn.rows[rank] = row.clone()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or len(turn.rows) == self._ranks, seconds)
            if len(turn.rows) < self._ranks:
                if self._ended:
                    raise Broken(self._ended)
                self._ended = f"rank {rank} had waited too long in all_gather, epoch {epoch}"
                self._changed.notify_all()
                missing = tuple(r for r in range(self._ranks) if r not in turn.rows)
                raise PeerTimeout(rank, missing, "all_gather", epoch, seconds)
            turn.left += 1
            if turn.left == self._ranks:
                del self._turns[number]
            sizes = [turn.rows[r].numel() for r in range(self._ranks)]
            if len(set(sizes)) > 1:
                raise Mismatch(f"all_gather, epoch {epoch}: ranks bring {sizes} values")
            return torch.stack([turn.rows[r] for r in range(self._ranks)])

    def end(self, reason: str) -> None:
        """All that wait, and all that come later, get `Broken`."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()
