"""The ops on an NVIDIA GPU. Nothing here waits for the device, so that CUDA graphs can hold it.

Attention over the window alone is `mla_fp4`'s sparse kernel without a selected row, where that package is installed.
Its kernel for many consecutive rows, `window_prefill`, has bits of its own and runs only for those who ask for it.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

from kernel_core import check
from kernel_core.cuda import aligned, cuda_module, multiprocessors, same_device, stream

LARGEST_RING = 1 << 16
_DIM, _ROPE, _WINDOW, _HEADS, _ROW = 512, 64, 128, 64, 528


@cache
def sparse_kernels() -> Any:
    """`mla_fp4.cuda.attention`, or None where the package is not there or was built without CUDA."""
    if importlib.util.find_spec("mla_fp4") is None or importlib.util.find_spec("mla_fp4._cuda") is None:
        return None
    return importlib.import_module("mla_fp4.cuda.attention")


def window_attention(
    q: torch.Tensor,
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    sink: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """`swa_replay.window_attention` without `block`; None where no kernel takes the shapes."""
    kernels = sparse_kernels()
    if kernels is None or not kernels.fits(q, ring, window, 0, rope):
        return None
    result: torch.Tensor = kernels.sparse_attention(
        q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, window, None, 1, None, None, sink, rope, scale,
        out=out,
    )  # fmt: skip
    return result


def window_prefill(
    q: torch.Tensor,
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    lower: torch.Tensor,
    window: int,
    sink: torch.Tensor,
    rope: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`swa_replay.window_attention` for many consecutive rows a request, on SM90 alone: bfloat16 in, bfloat16 out.

    Every key is decoded once for a run of rows. The sums run in the order of positions modulo 144, not of the keys'
    ages, so the bits are not those of `window_attention`; like those they depend on the row alone. A layer without
    selected rows is therefore served either by this, in prefill and in decoding, or never. No op chooses it.

    Raises:
        ValueError: shapes other than packed rows of 512 channels, 64 of them rotated, heads in multiples of 64 and a
            window up to 128; addresses that are no multiples of 16; a GPU of another kind.
        RuntimeError: `mla_fp4` was built without CUDA.
    """
    same_device(
        q, new_rows=new_rows, ring=ring, ring_slot=ring_slot, cu_seqlens=cu_seqlens, start_pos=start_pos, lower=lower,
        sink=sink, rope=rope,
    )  # fmt: skip
    rows, batch = q.shape[0], start_pos.shape[0]
    check.tensor("q", q, dtype=torch.bfloat16, shape=(rows, None, _DIM))
    heads = q.shape[1]
    check.require(heads > 0 and heads % _HEADS == 0, "q", heads, f"heads in multiples of {_HEADS}")
    check.require(0 < window <= _WINDOW, "window", window, f"1 to {_WINDOW}")
    check.tensor("new_rows", new_rows, dtype=torch.uint8, shape=(rows, _ROW))
    check.tensor("ring", ring, dtype=torch.uint8, shape=(None, None, _ROW))
    check.require(window <= ring.shape[1] <= LARGEST_RING, "ring", ring.shape[1], f"{window} to {LARGEST_RING} rows")
    check.exactly(
        ("ring_slot", ring_slot, torch.int32, (batch,)),
        ("cu_seqlens", cu_seqlens, torch.int32, (batch + 1,)),
        ("start_pos", start_pos, torch.int64, (batch,)),
        ("lower", lower, torch.int64, (batch,)),
        ("sink", sink, torch.float32, (heads,)),
        ("rope", rope, torch.float32, (rows, _ROPE)),
    )
    check.require(aligned(q, new_rows, ring, rope), "q, new_rows, ring, rope", "an address", "multiples of 16 bytes")
    out = torch.empty_like(q)
    if rows:
        module = cuda_module("mla_fp4")
        module.window_prefill(
            q=q.data_ptr(),
            new_rows=new_rows.data_ptr(),
            ring=ring.data_ptr(),
            ring_slot=ring_slot.data_ptr(),
            cu_seqlens=cu_seqlens.data_ptr(),
            start_pos=start_pos.data_ptr(),
            lower=lower.data_ptr(),
            sink=sink.data_ptr(),
            rope=rope.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            heads=heads,
            batch=batch,
            slots=ring.shape[0],
            ring_rows=ring.shape[1],
            window=window,
            scale=scale,
            run_rows=module.window_run_rows(rows, heads, batch, multiprocessors(q.device)),
            stream=stream(q.device),
        )
    return out


def store_window(
    new_rows: torch.Tensor,
    ring: torch.Tensor,
    ring_slot: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    floor: torch.Tensor,
) -> None:
    """`swa_replay.store_window` of rings of at most `LARGEST_RING` rows."""
    same_device(new_rows, ring=ring, ring_slot=ring_slot, cu_seqlens=cu_seqlens, start_pos=start_pos, floor=floor)
    rows, row = new_rows.shape
    if rows and row:
        cuda_module("swa_replay").store_window(
            new_rows=new_rows.data_ptr(),
            ring=ring.data_ptr(),
            ring_slot=ring_slot.data_ptr(),
            cu_seqlens=cu_seqlens.data_ptr(),
            start_pos=start_pos.data_ptr(),
            floor=floor.data_ptr(),
            rows=rows,
            row_bytes=row * new_rows.element_size(),
            batch=start_pos.shape[0],
            slots=ring.shape[0],
            ring_rows=ring.shape[1],
            stream=stream(new_rows.device),
        )
