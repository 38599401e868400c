"""One layer's routed experts over the GPUs of a host, without a wait of the host: a CUDA graph can hold it.

Two ways, the same bits as one GPU that holds every expert. "fused": a rank lays its tokens out (`FusedExchange`), and
one kernel reads peers' rows, multiplies and stores results at their home. "steps": dispatch with fixed places, this
rank's experts a row a slot, combine in the order of slots.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch

import mega_moe
from mega_moe.cuda import experts as kernels
from mega_moe.cuda.layout import PackedExperts
from mega_moe.cuda.ranks import Ranks
from mega_moe.cuda.route import permute
from orchestrator.model.expert_parallel.held import HeldExperts
from orchestrator.model.expert_parallel.pool import PackedPool

if TYPE_CHECKING:
    from ep_comm import Communicator
    from ep_comm.cuda import FusedExchange


class DeviceCounts(Protocol):
    """What a step routed, counted on the device.

    routed: int32 [layers, experts], wanted logical experts without padding, added up. received: int64 [layers], slots
    that came to this rank's experts.
    """

    routed: torch.Tensor
    received: torch.Tensor


class GpuExperts:
    """Takes the place of a layer's experts; all ranks call it, or `join`, in the same order of layers.

    shared: the layer's shared expert, packed, in a `PackedExperts` whose other weights are not used; its tokens stay
    at home. fused: the exchange of the "fused" way; None for "steps".
    """

    def __init__(
        self,
        layer: int,
        communicator: Communicator,
        held: HeldExperts,
        shared: PackedExperts,
        limit: float,
        counts: DeviceCounts | None = None,
        fused: FusedExchange | None = None,
    ) -> None:
        pool = held.pool
        assert isinstance(pool, PackedPool)
        self.layer, self.communicator, self.held, self.limit = layer, communicator, held, limit
        self.counts, self.fused = counts, fused
        both = {name: getattr(shared, name) for name in ("shared13", "shared2")}
        self._shared = dataclasses.replace(pool.packed, **both)
        self._ranks = None if fused is None else Ranks(**fused.buffers.tables()._asdict())

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        padding: torch.Tensor | None = None,
        owner: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x float32 [T, hidden]; ids int32 [T, top_k], logical; weights float32 [T, top_k]; float32 [T, hidden].

        padding: bool [T], rows that are counted nowhere and sent nowhere; their routed sum is zero. owner: not used;
        the device does not tell prompts from decoding.
        """
        return self._steps(x, ids, weights, padding) if self.fused is None else self._fuse(x, ids, weights, padding)

    def join(self) -> None:
        """Take part with no token: others' tokens may need this rank's experts."""
        shape, device = self.communicator.shape, self.held.pool.device
        nothing = torch.empty(0, shape.hidden, device=device)
        ids = torch.empty(0, shape.top_k, dtype=torch.int32, device=device)
        self(nothing, ids, torch.empty(0, shape.top_k, device=device))

    def _fuse(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        fused, counts = self.fused, self.counts
        assert fused is not None and self._ranks is not None
        chosen = fused.publish(
            x, ids, weights,
            copies=self.held.tables(self.layer),
            padding=padding,
            routed=None if counts is None else counts.routed[self.layer],
            received=None if counts is None else counts.received[self.layer : self.layer + 1],
        )  # fmt: skip
        places = self.held.buffers[self.layer]
        offsets, rows = permute(fused.buffers.mine, places.numel(), shared=False)
        mine = fused.buffers.x[fused.buffers.rank][: x.shape[0]]
        return kernels.experts(
            mine, chosen, weights, self._shared, offsets, rows,
            limit=self.limit, out=torch.empty_like(x), ranks=self._ranks, places=places,
        )  # fmt: skip

    def _steps(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        chosen = self.held.choose(self.layer, ids, padding)
        sent = self.communicator.dispatch(x, chosen, weights, fixed=True)
        if self.counts is not None:
            valid = chosen >= 0
            self.counts.routed[self.layer].scatter_add_(
                0, torch.where(valid, ids, 0).flatten().long(), valid.flatten().int()
            )
            self.counts.received[self.layer] = (sent.ids >= 0).sum()
        pool = self.held.pool
        assert isinstance(pool, PackedPool)
        y = mega_moe.packed_slots(
            sent.x, sent.ids, sent.weights, pool.packed, limit=self.limit, places=self.held.buffers[self.layer]
        )
        return self.communicator.combine(y, sent).add_(self._at_home(x))

    def _at_home(self, x: torch.Tensor) -> torch.Tensor:
        nowhere = torch.full((x.shape[0], 1), -1, dtype=torch.int32, device=x.device)
        return mega_moe.packed_experts(x, nowhere, x.new_zeros(x.shape[0], 1), self._shared, limit=self.limit)
