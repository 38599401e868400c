"""What every transport offers: one object a rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from ep_comm.results import Dispatched, Transfer
from ep_comm.shape import Shape

Reduction = Literal["sum", "max", "min"]


class Moving(Protocol):
    """Transfers under way."""

    def done(self) -> bool:
        """Whether all of this rank's buffers may be used again. Never waits. Raises `CommError` if a peer is gone."""

    def wait(self, timeout: float | None = None) -> None:
        """Until `done`; `PeerTimeout` after `timeout` seconds (the communicator's own without one)."""


class Communicator(ABC):
    """One rank's end. Collectives are called by all ranks in the same order, with no tokens too; none is optional.

    Each collective has the next epoch of the communicator; its counts and flags carry it, so that nothing of an
    earlier one can be taken for it. All waits end after `timeout` seconds with `PeerTimeout`, which names the ranks
    that had not come. One thread at a time calls; `done` and `abort` may be called by another.

    Attributes:
        shape: the sizes; rank: 0 to shape.ranks - 1; timeout: seconds; epoch: of the last collective that was begun.
    """

    shape: Shape
    rank: int
    timeout: float
    epoch: int

    @abstractmethod
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, fixed: bool = False) -> Dispatched:
        """Send each token once to every rank that holds one of its experts.

        x: float32 or bfloat16 [T, hidden], 0 <= T <= max_tokens; rounded or quantised here to the dispatch format.
        ids: int32 [T, top_k], physical experts, -1 an empty slot. weights: float32 [T, top_k].

        Raises:
            ValueError: names the argument; nothing was sent, the epoch is not used up.
            CommError: a peer did not come, is elsewhere, or is gone.
        """

    @abstractmethod
    def combine(self, y: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Bring results home and add them, in float32: float32 [T, hidden], zeros for a token without experts.

        y: float32 or bfloat16, rows as in `dispatched`, weights applied. [N, top_k, hidden] has a row a slot: they are
        added in the order of slots whatever rank they come from, so the bits are those of one rank; rows of empty
        slots are not read. [N, hidden] has been added up on this rank: ranks are added in their order, which sends
        less and rounds differently for other placements.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Until all ranks are here. Device transports order it on the current stream; the host does not wait."""

    @abstractmethod
    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """int64 [n], n <= 65536 and equal on all ranks, on the host: int64 [ranks, n]. A host-side collective."""

    def all_reduce(self, row: torch.Tensor, how: Reduction = "sum") -> torch.Tensor:
        """int64 [n] on the host: the sum, maximum or minimum over ranks."""
        rows = self.all_gather(row)
        return rows.sum(0) if how == "sum" else rows.amax(0) if how == "max" else rows.amin(0)

    @abstractmethod
    def move(self, transfers: Sequence[Transfer]) -> Moving:
        """Start transfers that this rank sends or receives. Not a collective: only the two ranks of each are concerned.

        Runs beside collectives. A transfer whose other side does not come ends by `wait`'s time-out and breaks nothing.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End all ranks' waits with `Broken`. Idempotent, from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give up buffers. Idempotent; peers that still wait get `Broken`."""
