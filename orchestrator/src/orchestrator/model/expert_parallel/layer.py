"""One layer's routed experts over all ranks: dispatch, this rank's experts, combine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

import mega_moe
from orchestrator.balance.eplb.placement import EMPTY
from orchestrator.model.expert_parallel.held import HeldExperts
from orchestrator.model.expert_parallel.pool import ExpertPool

if TYPE_CHECKING:
    from ep_comm import Communicator, Dispatched

Combine = Literal["slots", "ranks"]


class Counts(Protocol):
    """Who is told what a step routed."""

    def routed(self, layer: int, ids: np.ndarray, valid: np.ndarray, owner: np.ndarray | None = None) -> None:
        """Logical experts [T, top_k] of this rank's tokens, which rows count, bool [T], and whose they are, [T]."""

    def received(self, layer: int, rows: int) -> None:
        """(Token, slot) pairs that came to this rank's experts."""


class ParallelExperts:
    """Takes the place of a layer's experts; all ranks call it, or `join`, in the same order of layers.

    With `combine` "slots" each (token, slot) is a row of its own, added at home in the order of slots: the bits are
    those of one rank that holds every expert, wherever the copies are. "ranks" adds up on each rank first, which sends
    less and rounds differently with the placement.
    """

    def __init__(
        self,
        layer: int,
        communicator: Communicator,
        held: HeldExperts,
        shared: mega_moe.SharedExpert,
        limit: float,
        counts: Counts | None = None,
        combine: Combine = "slots",
    ) -> None:
        assert isinstance(held.pool, ExpertPool)
        self.layer, self.communicator, self.held, self.pool = layer, communicator, held, held.pool
        self.shared, self.limit, self.counts, self.combine = shared, limit, counts, combine

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        padding: torch.Tensor | None = None,
        owner: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x float32 [T, hidden]; ids int32 [T, top_k], logical; weights float32 [T, top_k]; float32 [T, hidden].

        padding: bool [T], rows that are counted nowhere and sent nowhere; their routed sum is zero.
        owner: int64 [T], each row's request in the step; only counts ask for it.
        """
        if self.counts is not None:
            valid = np.ones(len(ids), np.bool_) if padding is None else ~padding.cpu().numpy()
            whose = None if owner is None else owner.cpu().numpy()
            self.counts.routed(self.layer, ids.cpu().numpy(), valid, whose)
        chosen, most = self.held.choose(self.layer, ids, padding), self.communicator.shape.top_k
        if chosen.shape[1] < most:  # a draft stage takes fewer experts than the link has places for
            chosen = torch.nn.functional.pad(chosen, (0, most - chosen.shape[1]), value=EMPTY)
            weights = torch.nn.functional.pad(weights, (0, most - weights.shape[1]))
        sent = self.communicator.dispatch(x, chosen, weights)
        out = self.communicator.combine(self._experts(sent), sent)
        return out.add_(self._shared(x))

    def join(self) -> None:
        """Take part with no token: others' tokens may need this rank's experts."""
        shape, device = self.communicator.shape, self.held.buffers.device
        nothing = torch.empty(0, shape.hidden, device=device)
        self(
            nothing,
            torch.empty(0, shape.top_k, dtype=torch.int32, device=device),
            torch.empty(0, shape.top_k, device=device),
        )

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        nowhere = torch.full((x.shape[0], 1), -1, dtype=torch.int32, device=x.device)
        pool = self.pool
        return mega_moe.fused_experts(
            x, nowhere, x.new_zeros(x.shape[0], 1), pool.w13, pool.s13, pool.w2, pool.s2,
            limit=self.limit, shared=self.shared,
        )  # fmt: skip

    def _experts(self, sent: Dispatched) -> torch.Tensor:
        """Rows of this rank's experts: float32 [N, top_k, hidden] by slot, or [N, hidden] added up."""
        x = values_of(sent)
        buffers = self.held.buffers[self.layer]
        row, slot = (sent.ids >= 0).nonzero(as_tuple=True)
        if self.counts is not None:
            self.counts.received(self.layer, len(row))
        if self.combine == "ranks":
            ids = torch.where(sent.ids >= 0, buffers[sent.ids.clamp(min=0).long()], -1)
            weights = torch.where(sent.ids >= 0, sent.weights, 0.0)
            return self._run(x, ids, weights)
        parts = self._run(x[row], buffers[sent.ids[row, slot].long()][:, None], sent.weights[row, slot][:, None])
        y = torch.empty(*sent.ids.shape, x.shape[1], device=x.device)
        y[row, slot] = parts
        return y

    def _run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pool = self.pool
        return mega_moe.fused_experts(
            x.contiguous(), ids.contiguous(), weights.contiguous(), pool.w13, pool.s13, pool.w2, pool.s2,
            limit=self.limit,
        )  # fmt: skip


def values_of(sent: Dispatched) -> torch.Tensor:
    """Dispatched rows as float32 [N, hidden]."""
    if sent.scales is None:
        return sent.x.float()
    groups = sent.x.float().view(sent.x.shape[0], sent.scales.shape[1], -1)
    return (groups * sent.scales[..., None]).view(sent.x.shape)
