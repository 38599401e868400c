"""Routed and shared experts by the CUDA C++ kernels of SM100: MXFP4 weights as stored, activations in MXFP8.

Compiled, never run. csrc/cuda/sm100/expert_plan_sm100.cuh says where what stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_core.check import require, tensor
from kernel_core.cuda import aligned, cuda_module, multiprocessors, pointer, same_device, stream, workspace
from mega_moe.cuda.route import permute
from mega_moe.weights import SharedExpert

SHAPES = ((16, 1), (64, 1), (64, 2), (96, 2))  # rows of a token tile, CTAs that share a product
_MOST_EXPERTS = 512
_WORD = 4  # scales of 128 columns


@dataclass(frozen=True)
class PackedExpertsSm100:
    """w13, w2: the checkpoint's codes, untouched; shared13, shared2: E4M3, likewise.

    scale13, scale2: uint8 [E, bytes] in the kernels' order, with a shared expert [E + 1, bytes].
    """

    w13: torch.Tensor
    w2: torch.Tensor
    scale13: torch.Tensor
    scale2: torch.Tensor
    d: int
    inter: int
    shared13: torch.Tensor | None = None
    shared2: torch.Tensor | None = None


def pack_experts(
    w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, shared: SharedExpert | None = None
) -> PackedExpertsSm100:
    """From the weights that `mega_moe.fused_experts` takes; codes are not copied.

    Raises ValueError for widths that are no multiples of 256 and 128, and for a shared expert of another width.
    """
    experts, d, half = w2.shape
    inter = 2 * half
    require(d % 256 == 0 and inter % 128 == 0, "w2", f"[{d}, {inter}]", "multiples of 256 and 128")
    tensor("w13", w13, dtype=torch.uint8, shape=(experts, 2 * inter, d // 2))
    tensor("s13", s13, dtype=torch.uint8, shape=(experts, 2 * inter, d // 32))
    tensor("s2", s2, dtype=torch.uint8, shape=(experts, d, inter // 32))
    codes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if shared is not None:
        require(tuple(shared.w2.shape) == (d, inter), "shared.w2", list(shared.w2.shape), f"[{d}, {inter}]")
        codes = shared.w13, shared.w2
        s13, s2 = (
            torch.cat((routed, scale.repeat_interleave(32, dim=0).unsqueeze(0)))
            for routed, scale in ((s13, shared.s13), (s2, shared.s2))
        )
    return PackedExpertsSm100(w13, w2, pack_scales(s13, gated=True), pack_scales(s2, gated=False), d, inter, *codes)


def unpack_experts(
    packed: PackedExpertsSm100,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, SharedExpert | None]:
    """The exact inverse of `pack_experts`."""
    count = packed.w13.shape[0]
    s13 = unpack_scales(packed.scale13, 2 * packed.inter, gated=True)
    s2 = unpack_scales(packed.scale2, packed.d, gated=False)
    shared = None
    if packed.shared13 is not None and packed.shared2 is not None:
        shared = SharedExpert(
            packed.shared13, s13[count, ::32].contiguous(), packed.shared2, s2[count, ::32].contiguous()
        )
    return packed.w13, s13[:count], packed.w2, s2[:count], shared


def pack_where_it_fits(
    w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor, shared: SharedExpert | None
) -> PackedExpertsSm100 | None:
    """None for widths or a number of experts that the kernels do not take."""
    experts, d, half = w2.shape
    same_width = shared is None or tuple(shared.w2.shape) == (d, 2 * half)
    if d % 256 or half % 64 or experts > _MOST_EXPERTS or not same_width:
        return None
    return pack_experts(w13, s13, w2, s2, shared)


def pack_scales(scale: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """UE8M0 [E, R, K/32] to uint8 [E, R K/32]: by block, step and product, 128 rows as tensor memory wants them.

    A block's products are the gate and the up rows of 128 channels (`gated`), or its first and its second 128 rows.
    """
    parts = scale.unflatten(-1, (-1, _WORD))
    if gated:  # [E, product, block, quarter, row of it, step, byte]
        return parts.unflatten(1, (2, -1, 4, 32)).permute(0, 2, 5, 1, 4, 3, 6).flatten(1).contiguous()
    return parts.unflatten(1, (-1, 2, 4, 32)).permute(0, 1, 5, 2, 4, 3, 6).flatten(1).contiguous()


def unpack_scales(packed: torch.Tensor, rows: int, *, gated: bool) -> torch.Tensor:
    """The exact inverse of `pack_scales`."""
    parts = packed.unflatten(-1, (rows // 256, -1, 2, 32, 4, _WORD))
    order = (0, 3, 1, 5, 4, 2, 6) if gated else (0, 1, 3, 5, 4, 2, 6)
    return parts.permute(*order).flatten(1, 4).flatten(2).contiguous()


def fits(packed: PackedExpertsSm100, x: torch.Tensor) -> bool:
    """Whether the device and the sizes are what the kernels are for."""
    ten = torch.cuda.get_device_capability(x.device) == (10, 0)  # code of sm_100a runs on nothing else
    even = all(pointer(w) % 32 == 0 for w in (packed.w13, packed.w2, packed.shared13, packed.shared2))
    return ten and x.shape[1] == packed.d and packed.w13.shape[0] <= _MOST_EXPERTS and even and aligned(x)


def shape(rows: int, experts: int, d: int, inter: int) -> tuple[int, int]:
    """Token tile and CTAs for `rows` (tokens times slots) over `experts`: by the mean, not measured."""
    mean = -(-rows // max(1, experts))
    if mean <= 16:
        return SHAPES[0]
    if d % 512 or inter % 256:
        return SHAPES[1]
    return SHAPES[2] if mean <= 64 else SHAPES[3]


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExpertsSm100,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    *,
    limit: float,
    out: torch.Tensor | None = None,
    tile: tuple[int, int] | None = None,
    grid: int | None = None,
) -> torch.Tensor:
    """`mega_moe.fused_experts` with x and gated rows in E4M3, a UE8M0 scale for 32 channels; sums are float32.

    x: bfloat16 or float32 [T, d]; out: the same dtype. offsets, rows: `mega_moe.cuda.route.permute`, with the shared
    expert as one more where there is one. tile: one of SHAPES. grid: CTAs of a product, by default as many as the
    device has multiprocessors.
    """
    same_device(x, ids=ids, weights=weights, w13=packed.w13, w2=packed.w2, offsets=offsets, rows=rows, out=out)
    tokens, d = x.shape
    slots, count = ids.shape[1], packed.w13.shape[0]
    result = torch.empty_like(x) if out is None else out
    if tokens == 0:
        return result
    chosen = shape(tokens * slots, count, d, packed.inter) if tile is None else tile
    require(chosen in SHAPES, "tile", chosen, f"one of {SHAPES}: rows of a token tile, CTAs")
    module = cuda_module("mega_moe")
    sizes = module.experts_sm100_sizes(tokens, slots, d, packed.inter, count, packed.shared13 is not None, chosen[0])
    images, hidden, parts = (workspace(size, x.device) for size in sizes)
    module.experts_sm100(
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
        shared13=pointer(packed.shared13),
        shared2=pointer(packed.shared2),
        scale13=packed.scale13.data_ptr(),
        scale2=packed.scale2.data_ptr(),
        limit=limit,
        out=result.data_ptr(),
        out_is_float=result.dtype is torch.float32,
        images=images.data_ptr(),
        hidden=hidden.data_ptr(),
        parts=parts.data_ptr(),
        tile=chosen[0],
        ctas=chosen[1],
        grid=multiprocessors(x.device) if grid is None else grid,
        stream=stream(x.device),
    )
    return result


def fused_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExpertsSm100,
    *,
    limit: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mega_moe.fused_experts`: sorts rows by expert, then the chain of launches."""
    offsets, rows = permute(ids, packed.w13.shape[0], shared=packed.shared13 is not None)
    return experts(x, ids, weights, packed, offsets, rows, limit=limit, out=out)
