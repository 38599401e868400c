"""One rank: what comes back is what went out, rounded as on the way between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_comm import arguments, reference
from ep_comm.communicator import Communicator, Moving
from ep_comm.errors import Broken
from ep_comm.results import Dispatched, Transfer
from ep_comm.rows import round_results
from ep_comm.shape import Shape
from kernel_core.check import require


class _Done:
    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return


class LocalCommunicator(Communicator):
    """World 1 on the CPU. Nothing waits, so nothing times out."""

    def __init__(self, shape: Shape) -> None:
        require(shape.ranks == 1, "shape", f"{shape.ranks} ranks", "1 rank")
        self.shape, self.rank, self.timeout, self.epoch = shape, 0, 0.0, 0
        self._latest, self._tokens = 0, 0
        self._ended = ""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, fixed: bool = False) -> Dispatched:
        self._alive()
        arguments.check_dispatch(self.shape, x, ids, weights)
        self.epoch += 1
        self._latest, self._tokens = self.epoch, x.shape[0]
        return reference.dispatch(self.shape, [x], [ids], [weights], fixed=fixed, epoch=self.epoch)[0]

    def combine(self, y: torch.Tensor, dispatched: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self._alive()
        slots = arguments.check_combine(self.shape, y, dispatched, out, self._tokens, self._latest)
        self.epoch += 1
        if out is None:
            out = torch.empty(self._tokens, self.shape.hidden)
        out.zero_()
        rows = slice(0, int(dispatched.counts[0]))
        tokens = dispatched.sources[rows].long()
        if not slots:
            out[tokens] += round_results(y[rows], self.shape)
            return out
        for slot in range(self.shape.top_k):
            here = dispatched.ids[rows, slot] >= 0
            out[tokens[here]] += round_results(y[rows][here, slot], self.shape)
        return out

    def barrier(self) -> None:
        self._alive()
        self.epoch += 1

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self._alive()
        arguments.check_row(row)
        self.epoch += 1
        return row[None].clone()

    def move(self, transfers: Sequence[Transfer]) -> Moving:
        """With one rank a transfer's two sides are the same buffer: nothing is left to do."""
        self._alive()
        arguments.check_transfers(self.shape, self.rank, transfers, set())
        return _Done()

    def abort(self, reason: str) -> None:
        self._ended = self._ended or f"rank 0 aborted: {reason}"

    def close(self) -> None:
        self._ended = self._ended or "rank 0 closed the communicator"

    def _alive(self) -> None:
        if self._ended:
            raise Broken(self._ended)


def local(shape: Shape) -> Communicator:
    """A communicator of one rank (`shape.ranks` must be 1), on the CPU."""
    return LocalCommunicator(shape)
