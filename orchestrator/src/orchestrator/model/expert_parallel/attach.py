"""Turns a model of one process into one rank of an expert-parallel group, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import mega_moe
from kernel_core.check import require
from orchestrator.balance.eplb.placement import EMPTY
from orchestrator.model.expert_parallel.held import HeldExperts
from orchestrator.model.expert_parallel.layer import Combine, Counts, ParallelExperts
from orchestrator.model.expert_parallel.source import ExpertSource
from orchestrator.model.transformer import Transformer

if TYPE_CHECKING:
    from ep_comm import Communicator


def attach(
    model: Transformer,
    communicator: Communicator,
    held: HeldExperts,
    counts: Counts | None = None,
    combine: Combine = "slots",
) -> None:
    """Have every backbone layer use the group's experts. Draft stages keep theirs: they are small, and on every rank.

    Raises:
        ValueError: the communicator's sizes are not the model's.
    """
    config, shape = model.config, communicator.shape
    require(model.device.type == "cpu", "model", f"one on {model.device}", "one on the CPU")
    for name, mine, theirs in (
        ("hidden", config.hidden_size, shape.hidden),
        ("top_k", config.num_experts_per_tok, shape.top_k),
        ("experts", held.slots.table.shape[2], shape.experts),
        ("ranks", held.slots.table.shape[1], shape.ranks),
    ):
        require(mine == theirs, f"communicator.shape.{name}", theirs, f"{mine}, as the model")
    for layer, moe in enumerate(model.moe):
        e = model.weights.layers[layer].experts
        shared = mega_moe.SharedExpert(e.shared_w13, e.shared_s13, e.shared_w2, e.shared_s2)
        moe.parallel = ParallelExperts(layer, communicator, held, shared, moe.limit, counts, combine)


def detach(model: Transformer) -> None:
    """The layers compute with their own experts again."""
    for moe in model.moe:
        moe.parallel = None


@torch.inference_mode()
def fill(held: HeldExperts, source: ExpertSource) -> int:
    """Load what the placement says into this rank's buffers; returns bytes read."""
    table = held.slots.table[:, held.rank]
    count = 0
    for layer, experts in enumerate(table.tolist()):
        for slot, expert in enumerate(experts):
            if expert != EMPTY:
                held.pool.write(int(held.slots.live[layer, slot]), 0, source.read(layer, expert))
                count += held.pool.expert_bytes
    return count
