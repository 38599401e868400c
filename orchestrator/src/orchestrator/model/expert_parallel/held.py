"""What one rank holds of all layers' experts, and which rank's copy each of its tokens goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from orchestrator.balance.eplb.messages import Turn
from orchestrator.balance.eplb.placement import EMPTY
from orchestrator.balance.eplb.rank_slots import RankSlots
from orchestrator.model.expert_parallel.pool import BufferPool

if TYPE_CHECKING:
    from ep_comm.cuda import CopyTables


class HeldExperts:
    """The buffers and routing of `RankSlots` as tensors that a forward pass reads; changed between steps, in place.

    Attributes:
        slots: which buffer is which slot. pool: the buffers.
        buffers: int32 [layers, slots a rank], the buffer of each of this rank's slots.
        change: has a change of the tensors made between two steps, which with overlapped steps is behind those that
            were started; by default at once.
    """

    def __init__(self, slots: RankSlots, pool: BufferPool) -> None:
        self.slots, self.pool = slots, pool
        device = pool.device
        layers, ranks, self._each = slots.table.shape
        self.buffers = torch.empty(layers, self._each, dtype=torch.int32, device=device)
        experts = slots.num_experts
        # Of each expert: its physical slots in ascending order, how many, and the one on this rank.
        self._copies = torch.empty(layers, experts, ranks, dtype=torch.int32, device=device)
        self._counts = torch.empty(layers, experts, dtype=torch.int32, device=device)
        self._own = torch.empty(layers, experts, dtype=torch.int32, device=device)
        self._ranks = ranks
        self.change: Callable[[Callable[[], None]], None] = lambda change: change()
        self._refresh(range(layers))

    @property
    def rank(self) -> int:
        return self.slots.rank

    def begin(self, turn: Turn) -> None:
        """Apply a turn between two steps: weights and routing of a layer change together."""
        self.slots.begin(turn)
        everything = turn.held is not None
        layers = range(self.buffers.shape[0]) if everything else sorted({flip.layer for flip in turn.flips})
        if layers:
            self._refresh(layers)

    def choose(self, layer: int, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """Logical experts int32 [T, top_k] to physical ones, int32, by the rule of `RoutingTable.choose`.

        padding: bool [T], rows that go nowhere (-1); None for no such row.
        """
        safe = ids.clamp(min=0).long()
        token = torch.arange(ids.shape[0], device=ids.device)[:, None]
        turn = (token + self.rank) % self._counts[layer][safe].clamp(min=1)
        chosen = self._copies[layer].view(-1)[safe * self._ranks + turn]
        own = self._own[layer][safe]
        chosen = torch.where(own != EMPTY, own, chosen)
        nowhere = ids < 0 if padding is None else (ids < 0) | padding[:, None]
        return chosen.masked_fill(nowhere, EMPTY)

    def tables(self, layer: int) -> CopyTables:
        """The same rule as tensors, for a kernel."""
        from ep_comm.cuda import CopyTables

        return CopyTables(self._own[layer], self._counts[layer], self._copies[layer])

    def digests(self) -> dict[tuple[int, int], tuple[int, str]]:
        """(layer, slot) to (expert, SHA-256 of its bytes) of every slot that holds one."""
        found = {}
        for layer, slot in np.argwhere(self.slots.table[:, self.rank] != EMPTY).tolist():
            expert = int(self.slots.table[layer, self.rank, slot])
            found[layer, slot] = (expert, self.pool.digest(int(self.slots.live[layer, slot])))
        return found

    def _refresh(self, layers: Iterable[int]) -> None:
        """Have the tensors of these layers changed to what the slots say now, whatever they say by then."""
        now = [(layer, *self._of(layer)) for layer in layers]

        def change() -> None:
            for layer, copies, counts, own, buffers in now:
                self._copies[layer].copy_(copies)
                self._counts[layer].copy_(counts)
                self._own[layer].copy_(own)
                self.buffers[layer].copy_(buffers)

        self.change(change)

    def _of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's copies, their counts, this rank's own ones and its buffers, int32 on the host."""
        routing = self.slots.routing(layer)
        copies = np.full((len(routing.counts), self._ranks), EMPTY, np.int32)
        copies[:, : routing.copies.shape[1]] = routing.copies
        own = np.where((copies != EMPTY) & (copies // self._each == self.rank), copies, EMPTY).max(1)
        return (
            torch.from_numpy(copies),
            torch.from_numpy(routing.counts.copy()),
            torch.from_numpy(own.astype(np.int32)),
            torch.from_numpy(self.slots.live[layer].astype(np.int32)),
        )
