"""Routed and shared experts whose weights are kept packed alone."""

from __future__ import annotations

import dataclasses

import torch

import kernel_core
from kernel_core.check import require
from mega_moe.cuda import experts as cuda_experts
from mega_moe.cuda import experts_sm100, layout, widen
from mega_moe.ops.experts import fused_experts
from mega_moe.weights import SharedExpert


def packed_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: layout.PackedExperts | experts_sm100.PackedExpertsSm100,
    *,
    limit: float = 10.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mega_moe.fused_experts` from packed weights, for callers that have given the stored ones away.

    x: float32 [T, d]; ids: int32 [T, k]; weights: float32 [T, k]; out: float32 [T, d], optional. Where the kernels do
    not run (a CPU, `kernel_core.using("library")`, rows that are not aligned) weights are unpacked for every call: the
    same results as `fused_experts`, for comparisons and not for speed.
    """
    where = kernel_core.elsewhere("mega_moe.packed_experts", x, kernels=True)
    kernels = where == "cuda" and not kernel_core.use_reference()
    if isinstance(packed, experts_sm100.PackedExpertsSm100):
        if kernels and experts_sm100.fits(packed, x):
            return experts_sm100.fused_experts(x, ids, weights, packed, limit=limit, out=out)
        *stored, same = experts_sm100.unpack_experts(packed)
        return fused_experts(x, ids, weights, *stored, limit=limit, shared=same, out=out)
    if kernels and cuda_experts.fits(packed, x):
        return cuda_experts.fused_experts(x, ids, weights, packed, limit=limit, out=out)
    w13, s13, w2, s2, shared = widen.unpack_experts(packed)
    whole = None if shared is None else SharedExpert(*shared)
    return fused_experts(x, ids, weights, w13, s13, w2, s2, limit=limit, shared=whole, out=out)


def packed_slots(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: layout.PackedExperts,
    *,
    limit: float = 10.0,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the expert of each slot gives, times the slot's weight, not added up: float32 [T, k, d].

    x: float32 or bfloat16 [T, d]; ids: int32 [T, k], outside of the experts for an empty slot, whose rows of the
    result may hold anything; weights: float32 [T, k]. places: int32 [experts], where an expert's weights stand in
    `packed`; by default expert e is the e-th. A shared expert among the packed ones has no part in it.

    For experts on several ranks: rows go home and are added there in the order of slots, which gives the bits of
    `packed_experts`. Where the kernels do not run weights are unpacked for every call.
    """
    count = packed.w13.shape[0] if places is None else places.numel()
    require(ids.shape == weights.shape and ids.shape[0] == x.shape[0], "ids", list(ids.shape), "[T, k], as weights")
    alone = dataclasses.replace(packed, shared13=None, shared2=None)
    where = kernel_core.elsewhere("mega_moe.packed_slots", x, kernels=True)
    if where == "cuda" and not kernel_core.use_reference() and cuda_experts.fits(packed, x, count):
        return cuda_experts.slot_results(x, ids, weights, alone, limit=limit, places=places)
    if places is not None:
        alone = dataclasses.replace(alone, w13=alone.w13[places.long()], w2=alone.w2[places.long()])
    *stored, _ = widen.unpack_experts(alone)
    rows = x.float().repeat_interleave(ids.shape[1], 0)
    slots = [t.reshape(-1, 1) for t in (ids, weights)]
    return fused_experts(rows, *slots, *stored, limit=limit).view(*ids.shape, x.shape[1])


def pack_for(
    device: torch.device,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    shared: SharedExpert | None,
) -> layout.PackedExperts | experts_sm100.PackedExpertsSm100 | None:
    """Packed by `mega_moe.cuda.layout` or `experts_sm100`, whichever has kernels for `device`; else None."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability == (10, 0):
        return experts_sm100.pack_where_it_fits(w13, s13, w2, s2, shared)
    if capability[0] != 9:
        return None
    return pack_where_it_fits(w13, s13, w2, s2, shared)


def pack_where_it_fits(
    w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, shared: SharedExpert | None
) -> layout.PackedExperts | None:
    """None for widths or scales that the packed form cannot hold. Few hidden channels get zeros beside them."""
    experts, d, half = w2.shape
    same_width = shared is None or tuple(shared.w2.shape) == (d, 2 * half)
    if not layout.fits(d, widen.wider(2 * half)) or half % 16 or experts > cuda_experts.MOST_EXPERTS or not same_width:
        return None
    if not layout.holds(s13, s2, shared):
        return None
    return widen.pack_experts(w13, s13, w2, s2, shared)
