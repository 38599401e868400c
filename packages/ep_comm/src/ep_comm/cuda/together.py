"""Virtual ranks in one launch: a range of CTAs each, so that they run at once by construction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ep_comm.cuda import sizes
from ep_comm.cuda.communicator import ANNOUNCE, BARRIER, COLLECT, COMBINE, PUSH, CudaCommunicator
from ep_comm.results import Dispatched
from kernel_core.check import require


class Together:
    """All ranks of `virtual`, 16 at most, as one: each call takes and gives a value a rank, on the current stream."""

    def __init__(self, ranks: Sequence[CudaCommunicator]) -> None:
        first = ranks[0].shape.ranks if ranks else 0
        require(len(ranks) == first, "ranks", len(ranks), f"all {first} of a group")
        require(len(ranks) <= sizes.MOST_HERE, "ranks", len(ranks), f"at most {sizes.MOST_HERE} in one launch")
        own = [r.connection.memory.data_ptr() for r in ranks]
        require(own == ranks[0].connection.addresses, "ranks", "those of several groups", "one group's, in order")
        self.ranks = list(ranks)

    def dispatch(
        self,
        xs: Sequence[torch.Tensor],
        ids: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        *,
        fixed: bool = False,
    ) -> list[Dispatched]:
        """`Communicator.dispatch` of every rank. All are checked before anything is launched."""
        given = zip(self.ranks, xs, ids, weights, strict=True)
        sent = [rank.begin_dispatch(x, i, w, fixed) for rank, x, i, w in given]
        self._launch(PUSH if fixed else ANNOUNCE, fixed)
        if fixed:
            return [r.fixed_rows(s) for r, s in zip(self.ranks, sent, strict=True)]
        torch.cuda.current_stream(self.ranks[0].device).synchronize()
        dispatched = [r.packed_rows(s) for r, s in zip(self.ranks, sent, strict=True)]
        self._launch(COLLECT, fixed)
        return dispatched

    def combine(
        self,
        ys: Sequence[torch.Tensor],
        dispatched: Sequence[Dispatched],
        *,
        outs: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        given = [None] * len(self.ranks) if outs is None else outs
        made = [r.begin_combine(y, d, o) for r, y, d, o in zip(self.ranks, ys, dispatched, given, strict=True)]
        self._launch(COMBINE, dispatched[0].fixed)
        return made

    def barrier(self) -> None:
        for rank in self.ranks:
            rank.begin_barrier()
        self.ranks[0].launch(BARRIER, self.ranks, 1)

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def _launch(self, op: int, fixed: bool) -> None:
        first = self.ranks[0]
        first.launch(op, self.ranks, sizes.ctas_of(first.shape, first.most_ctas, fixed))
