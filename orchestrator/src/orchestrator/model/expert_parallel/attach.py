"""Turns a model of one process into one rank of an expert-parallel group, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import mega_moe
from kernel_core.check import require
from mega_moe.cuda import widen
from mega_moe.cuda.layout import PackedExperts
from orchestrator.balance.eplb.placement import EMPTY
from orchestrator.model.expert_parallel.gpu_layer import DeviceCounts, GpuExperts
from orchestrator.model.expert_parallel.held import HeldExperts
from orchestrator.model.expert_parallel.layer import Combine, Counts, ParallelExperts
from orchestrator.model.expert_parallel.pool import ExpertPool, PackedPool
from orchestrator.model.expert_parallel.source import ExpertSource
from orchestrator.model.moe import Moe
from orchestrator.model.transformer import Transformer

if TYPE_CHECKING:
    from ep_comm import Communicator
    from ep_comm.cuda import FusedExchange


def attach(
    model: Transformer,
    communicator: Communicator,
    held: HeldExperts,
    counts: Counts | None = None,
    combine: Combine = "slots",
) -> None:
    """Have every backbone layer use the group's experts; for the draft stages there is `attach_drafts`.

    Raises:
        ValueError: the communicator's sizes are not the model's.
    """
    _check(model, communicator, held)
    require(isinstance(held.pool, ExpertPool), "held.pool", type(held.pool).__name__, "an ExpertPool")
    for layer, moe in enumerate(model.moe):
        e = model.weights.layers[layer].experts
        shared = mega_moe.SharedExpert(e.shared_w13, e.shared_s13, e.shared_w2, e.shared_s2)
        moe.parallel = ParallelExperts(layer, communicator, held, shared, moe.limit, counts, combine)


def attach_packed(
    model: Transformer,
    communicator: Communicator,
    held: HeldExperts,
    counts: DeviceCounts | None = None,
    fused: FusedExchange | None = None,
) -> None:
    """As `attach`, with experts as GPU kernels read them and no wait of the host in a layer.

    fused: has the experts' kernel read and write peers' memory itself; else rows are dispatched with fixed places.

    Raises:
        ValueError: sizes or formats are not the model's, or are not what the kernels take.
    """
    _check(model, communicator, held)
    pool = held.pool
    if not isinstance(pool, PackedPool):
        raise ValueError(f"held.pool: got {type(pool).__name__}, allowed is a PackedPool")
    formats = (communicator.shape.dispatch, communicator.shape.combine)
    allowed = "('bfloat16', 'float32'), which keep the bits of one rank"
    require(formats == ("bfloat16", "float32"), "communicator.shape formats", formats, allowed)
    pool.packed.state.zero_()  # launches of all ranks are counted from here
    for layer, moe in enumerate(model.moe):
        shared = _packed_shared(model, layer, moe)
        moe.parallel = GpuExperts(layer, communicator, held, shared, moe.limit, counts, fused)


def _packed_shared(model: Transformer, layer: int, moe: Moe) -> PackedExperts:
    if moe.packed is not None:
        if not isinstance(moe.packed, PackedExperts):
            raise ValueError(f"model: got {type(moe.packed).__name__}, allowed are experts packed for SM90")
        return moe.packed
    e = model.weights.layers[layer].experts
    shared = mega_moe.SharedExpert(e.shared_w13, e.shared_s13, e.shared_w2, e.shared_s2)
    return widen.pack_experts(e.w13[:0], e.s13[:0], e.w2[:0], e.s2[:0], shared)


def _check(model: Transformer, communicator: Communicator, held: HeldExperts) -> None:
    config, shape = model.config, communicator.shape
    require(
        held.pool.device == model.device, "held.pool", f"one on {held.pool.device}", f"{model.device}, as the model"
    )
    for name, mine, theirs in (
        ("hidden", config.hidden_size, shape.hidden),
        ("top_k", config.num_experts_per_tok, shape.top_k),
        ("experts", held.slots.table.shape[2], shape.experts),
        ("ranks", held.slots.table.shape[1], shape.ranks),
    ):
        require(mine == theirs, f"communicator.shape.{name}", theirs, f"{mine}, as the model")


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
