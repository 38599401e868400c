"""Experts of the draft stages over the ranks of a group.

They are spread like the backbone's and use the same link, but are neither counted nor moved: a stage's tokens are few
and all ranks draft for their own. Where each expert lies follows from what the ranks held before, by a pure function
that all of them evaluate alike; what a rank lacks it reads from the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

import mega_moe
from kernel_core.check import require
from orchestrator.balance.eplb.placement import EMPTY, Placement, initial, smallest_slots
from orchestrator.balance.eplb.rank_slots import RankSlots
from orchestrator.balance.eplb.repair import repair
from orchestrator.model.config import ModelConfig
from orchestrator.model.drafter import Drafter
from orchestrator.model.expert_parallel.held import HeldExperts
from orchestrator.model.expert_parallel.layer import Combine, ParallelExperts
from orchestrator.model.expert_parallel.pool import ExpertPool, ExpertShapes
from orchestrator.model.expert_parallel.source import ExpertSource

if TYPE_CHECKING:
    from ep_comm import Communicator


def draft_slots(config: ModelConfig, slots: int) -> int:
    """Draft experts of a stage that a rank has room for: every expert stays placed as long as the backbone's do.

    slots: backbone experts of a layer that a rank holds.
    """
    least = smallest_slots(config.n_routed_experts, slots)  # ranks that hold the backbone's experts at all
    return min(smallest_slots(config.dspark_n_routed_experts, least), config.dspark_n_routed_experts)


class DraftExperts:
    """What one rank holds of them, through all epochs.

    Attributes:
        table: int32 [stages, slots], the expert of each slot; `EMPTY` before anything was read.
        bytes_read: from the checkpoint so far.
    """

    def __init__(self, config: ModelConfig, slots: int, source: ExpertSource) -> None:
        """slots: backbone experts of a layer that a rank holds; physical numbers of the link count by them."""
        self.config, self._stride, self._source = config, slots, source
        self.slots, self.stages = draft_slots(config, slots), config.num_nextn_predict_layers
        require(self.slots <= slots, "slots", slots, f"{self.slots} or more, for the draft stages' experts")
        shapes = ExpertShapes.of(config.hidden_size, config.moe_intermediate_size)
        self.pool = ExpertPool(shapes, self.stages * self.slots)
        self.table = np.full((self.stages, self.slots), EMPTY, np.int32)
        self.bytes_read = 0

    def place(self, tables: np.ndarray) -> Placement:
        """From what all ranks hold, int32 [ranks, stages, slots], to where every expert lies. The same on all ranks."""
        held = np.ascontiguousarray(tables.transpose(1, 0, 2)).astype(np.int32)
        experts = self.config.dspark_n_routed_experts
        if (held == EMPTY).all():
            return initial(self.stages, experts, held.shape[1], self.slots)
        everyone, even = np.ones(held.shape[1], np.bool_), np.ones((1, experts), np.float32)
        filled = np.stack([repair(stage, even, everyone) for stage in held])
        return Placement(filled, experts)

    @torch.inference_mode()
    def take(self, placement: Placement, rank: int) -> HeldExperts:
        """Read what `rank` lacks, and return the routing of the stages."""
        first = self.config.num_hidden_layers
        for stage, slot in np.argwhere(placement.experts[:, rank] != self.table).tolist():
            expert = int(placement.experts[stage, rank, slot])
            if expert != EMPTY:
                self.pool.write(stage * self.slots + slot, 0, self._source.read(first + stage, expert))
                self.bytes_read += self.pool.expert_bytes
        self.table = placement.experts[:, rank].copy()
        wide = np.full((*placement.experts.shape[:2], self._stride), EMPTY, np.int32)
        wide[:, :, : self.slots] = placement.experts
        live = np.zeros((self.stages, self._stride), np.int64)  # behind `slots` nothing is ever read
        live[:, : self.slots] = np.arange(self.stages * self.slots).reshape(self.stages, self.slots)
        return HeldExperts(RankSlots(rank, Placement(wide, placement.num_experts), 1, live), self.pool)


def attach_drafts(drafter: Drafter, communicator: Communicator, held: HeldExperts, combine: Combine) -> None:
    """Have every draft stage use the group's experts."""
    for stage, (moe, weights) in enumerate(zip(drafter.moe, drafter.stages, strict=True)):
        e = weights.experts
        shared = mega_moe.SharedExpert(e.shared_w13, e.shared_s13, e.shared_w2, e.shared_s2)
        moe.parallel = ParallelExperts(stage, communicator, held, shared, moe.limit, None, combine)
