"""Norm, rotation, cache rows and pooling by the CUDA C++ kernels."""

from __future__ import annotations

import torch

from kernel_core.cuda import aligned, cuda_module, pointer, same_device, stream

_WIDTHS = (32, 64, 128, 256, 512)
_NORM_STEP, _NORM_WIDEST = 8, 8192
_ROPE_STEP = 16  # channels, in `kv_rows`
_LARGEST_RING = 1 << 16
_FLOAT32 = 0


def fits_norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, rope: torch.Tensor | None, out: torch.Tensor | None
) -> bool:
    d = x.shape[-1]
    turned = _NORM_STEP if rope is None else rope.shape[1]
    sizes = d % _NORM_STEP == 0 and 0 < d <= _NORM_WIDEST and turned > 0 and turned % _NORM_STEP == 0
    return sizes and aligned(x, weight, rope, out)


def norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor | None,
    *,
    inverse: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    same_device(x, weight=weight, rope=rope, out=out)
    result = torch.empty_like(x) if out is None else out
    rows, d = x.shape[0], x.shape[-1]
    if x.numel():
        cuda_module("mla_fp4").norm_rope(
            x=x.data_ptr(),
            weight=pointer(weight),
            rope=pointer(rope),
            out=result.data_ptr(),
            rows=rows,
            group=x.numel() // (rows * d),
            d=d,
            rope_dim=0 if rope is None else rope.shape[1],
            eps=eps,
            inverse=inverse,
            in_dtype=_FLOAT32,
            out_dtype=_FLOAT32,
            stream=stream(x.device),
        )
    return result


def fits_kv_rows(x: torch.Tensor, weight: torch.Tensor | None, rope: torch.Tensor | None) -> bool:
    turned = _ROPE_STEP if rope is None else rope.shape[1]
    return x.shape[1] in _WIDTHS and turned > 0 and turned % _ROPE_STEP == 0 and aligned(x, weight, rope)


def kv_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor | None,
    *,
    number: int,
    width: int,
    dtype: torch.dtype,
    round_bf16: bool,
) -> torch.Tensor:
    """`number` is the format's in csrc/cuda/kv_rows.hpp; the result is [T, width] of `dtype`."""
    same_device(x, weight=weight, rope=rope)
    rows, d = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    if rows:
        cuda_module("mla_fp4").kv_rows(
            x=x.data_ptr(),
            weight=pointer(weight),
            rope=pointer(rope),
            slots=0,
            out=out.data_ptr(),
            rows=rows,
            d=d,
            rope_dim=0 if rope is None else rope.shape[1],
            capacity=rows,
            rows_per_block=0,
            eps=eps,
            format=number,
            round_bf16=round_bf16,
            in_dtype=_FLOAT32,
            stream=stream(x.device),
        )
    return out


def store_rows(
    rows: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    code_bytes: int,
    scale_bytes: int,
    rows_per_block: int,
    capacity: int,
) -> None:
    """Rows of `code_bytes` + `scale_bytes` to their slots; pages of `rows_per_block` keep the two apart, 0 does not."""
    same_device(rows, pages=pages, slots=slots)
    if rows.shape[0]:
        cuda_module("mla_fp4").store_rows(
            rows_address=rows.data_ptr(),
            slots=slots.data_ptr(),
            out=pages.data_ptr(),
            rows=rows.shape[0],
            code_bytes=code_bytes,
            scale_bytes=scale_bytes,
            rows_per_block=rows_per_block,
            capacity=capacity,
            stream=stream(rows.device),
        )


def fits_compress(kv: torch.Tensor, gate: torch.Tensor, tail: torch.Tensor) -> bool:
    return kv.shape[1] % 4 == 0 and kv.shape[1] > 0 and tail.shape[1] <= _LARGEST_RING and aligned(kv, gate, tail)


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    tail: torch.Tensor,
    tail_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    same_device(kv, gate=gate, tail=tail, tail_slot=tail_slot, cu_seqlens=cu_seqlens, start_pos=start_pos)
    rows, d = kv.shape
    out = torch.zeros(groups, d, device=kv.device)
    if rows:
        cuda_module("mla_fp4").compress(
            kv=kv.data_ptr(),
            gate=gate.data_ptr(),
            tail=tail.data_ptr(),
            tail_slot=tail_slot.data_ptr(),
            cu_seqlens=cu_seqlens.data_ptr(),
            start_pos=start_pos.data_ptr(),
            out=out.data_ptr(),
            batch=start_pos.shape[0],
            rows=rows,
            d=d,
            slots=tail.shape[0],
            ring=tail.shape[1],
            groups=groups,
            stream=stream(kv.device),
        )
    return out
