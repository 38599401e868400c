"""Routed and shared experts by the CUDA C++ kernels of SM90."""

from __future__ import annotations

import torch

from kernel_core.check import require
from kernel_core.cuda import aligned, cuda_module, multiprocessors, pointer, same_device, stream, workspace
from mega_moe.cuda.layout import PackedExperts
from mega_moe.cuda.layout_fp8 import PackedExpertsFp8
from mega_moe.cuda.ranks import Ranks
from mega_moe.cuda.route import permute

TILES = (8, 16, 32, 64, 128)  # tokens of an expert that are multiplied at once
DIRECT = 16  # tiles of at most so many rows read bfloat16 x where it lies
TWICE = 5  # the variant with two CTAs on a multiprocessor
_MANY = 24  # experts from which on items of two blocks share the work well enough
CHAIN = (1, 2, 4, 8)  # gather, first product, second product, sum of slots: one launch each
MOST_EXPERTS = 512


def fits(packed: PackedExperts, x: torch.Tensor, count: int | None = None) -> bool:
    """Whether the device and the sizes are what the kernels are for; `count` of the packed experts, else all."""
    ninety = torch.cuda.get_device_capability(x.device)[0] == 9
    experts = packed.w13.shape[0] if count is None else count
    return ninety and x.shape[1] == packed.d and experts <= MOST_EXPERTS and aligned(x)


def token_tile(rows: int, experts: int) -> int:
    """Tile for `rows` (tokens times slots) over `experts`: twice what an expert gets on average, so that most fit.

    With few experts smaller items share the work better than larger tiles do. No bit of a result depends on it.
    """
    mean = -(-rows // max(1, experts))
    wanted = mean if experts < _MANY and mean > TILES[2] else 2 * mean
    return next((tile for tile in TILES if tile >= wanted), TILES[-1])


def default_variant(rows: int, experts: int, tile: int) -> int:
    """What was best on an H200 for `rows` (tokens times slots) over `experts`. No bit of a result depends on it."""
    many = min(rows, experts) >= _MANY
    if tile <= 16:
        return 4 if many else 0
    if tile == 32:
        return 2 if many else 0
    return 1 if tile == 64 and not many else 0


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
    tile: int | None = None,
    variant: int | None = None,
    ctas: int | None = None,
    chain: bool = False,
    ranks: Ranks | None = None,
    places: torch.Tensor | None = None,
    slot_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mega_moe.fused_experts` on packed weights: x and hidden rows are bfloat16, sums float32.

    x: bfloat16 or float32 [T, d] (rounded); out: the same dtype. offsets, rows: `mega_moe.cuda.route.permute` without
    the shared expert. chain: the same work as four launches, for comparison. With PackedExpertsFp8 activations are E4M3
    with a float32 scale for 128 channels of a row; there is no shared expert then, and token tiles have 128 rows.
    variant: of csrc/cuda/sm90/experts.cu, by default what was best at such sizes; no bit depends on it.
    ranks: experts of several ranks; all ranks launch at the same time, each with CTAs that fit on the device beside
    the others', and offsets and rows are those of `mega_moe.cuda.ranks.number_rows`.
    places: int32 [experts], where an expert's weights stand in `packed`; by default expert e is the e-th.
    slot_rows: float32 [T * k, d], takes each slot's result (weight applied; rows of empty slots are left as they are).
    Nothing is added up then; the result is slot_rows.
    """
    same_device(x, ids=ids, weights=weights, w13=packed.w13, w2=packed.w2, offsets=offsets, rows=rows, out=out,
                places=places, slot_rows=slot_rows)  # fmt: skip
    tokens, d = x.shape
    slots, count = ids.shape[1], packed.w13.shape[0] if places is None else places.numel()
    if slot_rows is not None:
        require(
            ranks is None and not chain and packed_shared(packed) is None, "slot_rows", "with another form", "alone"
        )
        out = slot_rows
    result = torch.empty_like(x) if out is None else out
    if tokens == 0 and ranks is None:
        return result
    module = cuda_module("mega_moe")
    fp8 = packed if isinstance(packed, PackedExpertsFp8) else None
    shared13, shared2 = packed_shared(packed) or (None, None)
    shared = shared13 is not None
    usual = slots * max(tokens, 0 if ranks is None else ranks.most)  # rows for this rank's experts
    columns = TILES[-1] if fp8 else token_tile(usual, count) if tile is None else tile
    require(columns in TILES, "tile", columns, f"one of {TILES}: tokens of experts at once")
    if variant is None:
        variant = 0 if fp8 else default_variant(usual, count, columns)
    if ctas is None:
        ctas = multiprocessors(x.device) * (2 if variant % 16 == TWICE else 1)
    everybody = tokens if ranks is None else ranks.everybody
    sizes = module.experts_sizes(everybody, slots, d, packed.inter, count, shared, columns)
    images, hidden = (workspace(size, x.device) for size in sizes[:2])
    parts = workspace(sizes[2], x.device) if slot_rows is None else slot_rows
    require(sizes[3] <= packed.state.numel() * 4, "ids", list(ids.shape), "fewer rows")
    table = None if ranks is None else ranks.table()  # read by the call
    for part in CHAIN if chain else (sum(CHAIN if slot_rows is None else CHAIN[:3]),):
        module.experts(
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
            places=pointer(places),
            scale13=0 if fp8 is None else fp8.scale13.data_ptr(),
            scale2=0 if fp8 is None else fp8.scale2.data_ptr(),
            shared13=pointer(shared13),
            shared2=pointer(shared2),
            shared_format=1,
            limit=limit,
            out=result.data_ptr(),
            out_is_float=result.dtype is torch.float32,
            images=images.data_ptr(),
            hidden=hidden.data_ptr(),
            parts=parts.data_ptr() if ranks is None else ranks.parts[ranks.rank].data_ptr(),
            state=packed.state.data_ptr(),
            parts_of_work=part,
            world=1 if ranks is None else len(ranks.x),
            rank=0 if ranks is None else ranks.rank,
            rows_of_rank=0 if ranks is None else ranks.rows_of_rank,
            met=ranks is not None and ranks.met,
            tables=0 if table is None else table.data_ptr(),
            columns=columns,
            variant=variant,
            ctas=ctas,
            stream=stream(x.device),
        )
    return result


def packed_shared(packed: PackedExperts | PackedExpertsFp8) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Weights of the shared expert, if it is packed beside the others."""
    if isinstance(packed, PackedExpertsFp8) or packed.shared13 is None or packed.shared2 is None:
        return None
    return packed.shared13, packed.shared2


def slot_results(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    *,
    limit: float,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each slot's expert gives, weight applied: float32 [T, k, d]; rows of empty slots hold anything."""
    count = packed.w13.shape[0] if places is None else places.numel()
    offsets, rows = permute(ids, count, shared=False)
    made = torch.empty(*ids.shape, x.shape[1], device=x.device)
    tile = token_tile(ids.numel(), count)
    if tile <= DIRECT:
        x = x.bfloat16()
    experts(x, ids, weights, packed, offsets, rows, limit=limit, tile=tile, places=places,
            slot_rows=made.view(-1, x.shape[1]))  # fmt: skip
    return made


def fused_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    *,
    limit: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mega_moe.fused_experts`: sorts rows by expert, then one launch. The result has the dtype of x."""
    offsets, rows = permute(ids, packed.w13.shape[0], shared=False)
    tile = token_tile(ids.numel(), packed.w13.shape[0])
    result = torch.empty_like(x) if out is None else out
    if tile <= DIRECT:  # the same rounding, and the kernel reads the rows itself
        x = x.bfloat16()
    return experts(x, ids, weights, packed, offsets, rows, limit=limit, out=result, tile=tile)


def report(packed: PackedExperts | PackedExpertsFp8) -> list[int] | None:
    """A wait that ran out of time: (which counter, target, seen, CTA); None where there was none. Synchronises."""
    words = packed.state[4:8].tolist()
    return [words[0] - 1000, *words[1:]] if words[0] else None
