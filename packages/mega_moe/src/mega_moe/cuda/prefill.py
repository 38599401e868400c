"""Routed experts for many tokens an expert, by the CUDA C++ kernels of SM90: a short chain of launches.

Rows are laid out once in the order of experts, in bfloat16 (W4A16) or in E4M3 with a float32 scale for 128 channels
(W4A8); MXFP4 weights become bfloat16 or E4M3 on their way to the products, once for up to 128 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_core.check import require
from kernel_core.cuda import aligned, cuda_module, multiprocessors, pointer, same_device, stream, workspace
from mega_moe.cuda.layout import PackedExperts
from mega_moe.cuda.layout_fp8 import PackedExpertsFp8

TILES = (64, 128)  # tokens of an expert that are multiplied at once
ROWS, FIRST, SECOND, SUM, EXPAND = 1, 2, 4, 8, 16  # launches: rows, products, sum of slots; weights in memory
ALL = ROWS | FIRST | SECOND | SUM
_MOST_EXPERTS = 512


@dataclass(frozen=True)
class Workspace:
    """What launches leave for each other. expanded13, expanded2: weights in E4M3, or None."""

    images: torch.Tensor
    hidden: torch.Tensor
    parts: torch.Tensor
    expanded13: torch.Tensor | None = None
    expanded2: torch.Tensor | None = None


def fits(packed: PackedExperts | PackedExpertsFp8, x: torch.Tensor) -> bool:
    """Whether the device and the sizes are what the kernels are for."""
    ninety = torch.cuda.get_device_capability(x.device)[0] == 9
    return ninety and x.shape[1] == packed.d and packed.w13.shape[0] <= _MOST_EXPERTS and aligned(x)


def new_workspace(
    packed: PackedExperts | PackedExpertsFp8,
    tokens: int,
    slots: int,
    device: torch.device,
    *,
    parts_are_float: bool = False,
    expanded: bool = False,
) -> Workspace:
    sizes = cuda_module("mega_moe").prefill_sizes(
        tokens=tokens,
        slots=slots,
        d=packed.d,
        inter=packed.inter,
        experts=packed.w13.shape[0],
        fp8=isinstance(packed, PackedExpertsFp8),
        parts_are_float=parts_are_float,
    )
    return Workspace(*(workspace(size, device) for size in sizes[: 5 if expanded else 3]))


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts | PackedExpertsFp8,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    *,
    limit: float,
    out: torch.Tensor | None = None,
    tile: int = 128,
    ctas: int | None = None,
    parts_are_float: bool | None = None,
    expanded: bool = False,
    lag: int = 0,
    steps: int = ALL,
    buffers: Workspace | None = None,
) -> torch.Tensor:
    """`mega_moe.fused_experts` without its shared expert, as `mega_moe.cuda.experts` on the same packed weights.

    x: bfloat16 or float32 [T, d] (rounded); out: the same dtype. offsets, rows: `mega_moe.cuda.route.permute` without
    the shared expert. parts_are_float: what the second product leaves for the sum of slots, bfloat16 or float32; if not
    said, float32, but x's dtype where activations are E4M3. One slot of out's dtype goes straight to out. expanded:
    weights become E4M3 in memory first (PackedExpertsFp8). lag: steps between the two warpgroups, 0 to 2. steps,
    buffers: some of the launches, and what they share. No bit depends on `tile`, `ctas`, `lag` or `expanded`; with
    float32 parts all bits are those of the fused kernel where activations are bfloat16.
    """
    same_device(x, ids=ids, weights=weights, w13=packed.w13, w2=packed.w2, offsets=offsets, rows=rows, out=out)
    require(tile in TILES, "tile", tile, f"one of {TILES}: tokens of experts at once")
    tokens, d = x.shape
    slots, count = ids.shape[1], packed.w13.shape[0]
    result = torch.empty_like(x) if out is None else out
    if tokens == 0:
        return result
    fp8 = packed if isinstance(packed, PackedExpertsFp8) else None
    require(fp8 is not None or not expanded, "expanded", expanded, "False for bfloat16 activations")
    float_parts = (fp8 is None or x.dtype is torch.float32) if parts_are_float is None else parts_are_float
    space = buffers or new_workspace(packed, tokens, slots, x.device, parts_are_float=float_parts, expanded=expanded)
    direct = slots == 1 and float_parts == (result.dtype is torch.float32)
    cuda_module("mega_moe").prefill(
        x=x.data_ptr(),
        x_is_float=x.dtype is torch.float32,
        tokens=tokens,
        slots=slots,
        d=d,
        inter=packed.inter,
        experts=count,
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        offsets=offsets.data_ptr(),
        rows=rows.data_ptr(),
        w13=packed.w13.data_ptr(),
        w2=packed.w2.data_ptr(),
        scale13=0 if fp8 is None else fp8.scale13.data_ptr(),
        scale2=0 if fp8 is None else fp8.scale2.data_ptr(),
        limit=limit,
        out=result.data_ptr(),
        out_is_float=result.dtype is torch.float32,
        images=space.images.data_ptr(),
        hidden=space.hidden.data_ptr(),
        parts=(result if direct else space.parts).data_ptr(),
        parts_are_float=float_parts,
        expanded13=pointer(space.expanded13) if expanded else 0,
        expanded2=pointer(space.expanded2) if expanded else 0,
        lag=lag,
        steps=steps | (EXPAND if expanded and steps == ALL else 0),
        tile=tile,
        ctas=multiprocessors(x.device) if ctas is None else ctas,
        stream=stream(x.device),
    )
    return result
