"""Products with FP8 weights by the CUDA C++ kernel, for few rows at once."""

from __future__ import annotations

import torch

from kernel_core.cuda import aligned, cuda_module, multiprocessors, same_device, stream

_CHUNK, _BLOCK = 64, 32  # columns a warp takes at once; rows and columns of a scale
_EXACT = 3  # bfloat16 terms that together are a float32
_LEAST = 8  # chunks of a CTA: its first and last steps cost as much as some chunks
_LARGEST = 65535 * 8  # tokens


def cluster(columns: int) -> int:
    """CTAs that share the columns. From their number alone: sums are added in this order, and so it is part of the
    result."""
    chunks = columns // _CHUNK
    return next((n for n in (8, 4, 2) if chunks >= _LEAST * n), 1)


def fits(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, groups: int, out: torch.Tensor) -> bool:
    """Whether the kernel takes these tensors; x float32 [T, groups, columns] or [T, columns]."""
    rows, columns = weight.shape
    sizes = columns >= _CHUNK and columns % _CHUNK == 0 and 0 < x.shape[0] <= _LARGEST and columns <= 1 << 15
    return scale is not None and sizes and (groups == 1 or rows // groups % _BLOCK == 0) and aligned(x, weight)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    groups: int = 1,
    *,
    terms: int = _EXACT,
    ctas: int | None = None,
    warps: int | None = None,
    tile: int | None = None,
    stages: int | None = None,
) -> torch.Tensor:
    """`mega_moe.linear` (one group) and `mega_moe.grouped_linear` on weights as they are stored.

    terms: bfloat16 numbers that stand for a value of x; 3 are exact, 1 rounds x to bfloat16 (W8A16). ctas: those that
    share the columns (part of the result). warps, tile, stages: how a launch is cut (no part of it).
    """
    same_device(x, weight=weight, scale=scale, out=out)
    tokens, (rows, columns) = x.shape[0], weight.shape
    ctas = cluster(columns) if ctas is None else ctas
    module = cuda_module("mega_moe")
    sizes = {"tokens": tokens, "groups": groups, "rows": rows // groups, "columns": columns}
    chosen = module.linear_shape(**sizes, terms=terms, cluster=ctas, multiprocessors=multiprocessors(x.device))
    module.linear(
        **sizes,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=scale.data_ptr(),
        out=out.data_ptr(),
        terms=terms,
        cluster=ctas,
        warps=chosen[0] if warps is None else warps,
        tile=chosen[1] if tile is None else tile,
        stages=chosen[2] if stages is None else stages,
        stream=stream(x.device),
    )
    return out
