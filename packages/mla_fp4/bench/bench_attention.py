"""Sparse attention at the shapes of the small model (4 heads, 128 + 64 keys) and the released one (64, 128 + 512)."""

from __future__ import annotations

import functools

import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.bench import Bench, Case, Problem

DIM, ROPE, WINDOW, RING, ROWS_PER_BLOCK = 512, 64, 128, 134, 128
START, VISIBLE = 8192, 8192  # a long context, so that every window and every list is full
NOTE = "float32 result; with AMX by three exact bfloat16 products, so a fraction can pass the float32 bound"


def _problem(requests: int, rows: int, heads: int, selected: int) -> Problem:
    g = torch.Generator().manual_seed(requests * rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    total, blocks = requests * rows, VISIBLE // ROWS_PER_BLOCK
    arguments = {
        "q": normal(total, heads, DIM),
        "new_rows": formats.quantize_window(normal(total, DIM)),
        "ring": formats.quantize_window(normal(requests + 1, RING, DIM)),
        "ring_slot": torch.arange(1, requests + 1).int(),
        "cu_seqlens": torch.arange(0, total + 1, rows).int(),
        "start_pos": torch.full((requests,), START),
        "lower": torch.zeros(requests).long(),
        "window": WINDOW,
        "pages": formats.quantize_main(normal(requests * blocks + 1, ROWS_PER_BLOCK, DIM)),
        "rows_per_block": ROWS_PER_BLOCK,
        "block_table": (torch.randperm(requests * blocks, generator=g) + 1).int().view(requests, blocks),
        "indices": torch.rand(total, VISIBLE, generator=g).topk(selected).indices.sort().values.int(),
        "sink": normal(heads),
        "rope": normal(total, ROPE),
        "scale": DIM**-0.5,
    }
    out = torch.empty(total, heads, DIM)

    def reference() -> torch.Tensor:
        with using("reference"):
            return mla_fp4.sparse_attention(**arguments)

    def check() -> None:
        torch.testing.assert_close(out, reference(), atol=1e-5, rtol=1e-5)

    distinct = sum(len(rows.unique()) for rows in arguments["indices"].view(requests, -1))
    keys = requests * (WINDOW - 1) * 528 + total * 528 + distinct * 288
    return Problem(
        native=functools.partial(mla_fp4.sparse_attention, **arguments, out=out),
        reference=reference,
        bytes=keys + 2 * out.numel() * 4,
        flops=4 * total * heads * DIM * (WINDOW + selected),
        check=check,
        note=NOTE,
    )


def _case(point: str, requests: int, rows: int, heads: int, selected: int) -> Case:
    shape = {"requests": requests, "rows": rows, "heads": heads, "dim": DIM, "window": WINDOW, "selected": selected}
    return Case(point, shape, functools.partial(_problem, requests, rows, heads, selected))


BENCHES = [
    Bench(
        "mla_fp4.sparse_attention",
        [
            _case("mla_decode_h4_b1", 1, 1, 4, 64),
            _case("mla_decode_h4_b16", 16, 1, 4, 64),
            _case("mla_prefill_h4_q512", 1, 512, 4, 64),
            _case("mla_decode_h64_b1", 1, 1, 64, 512),
            _case("mla_decode_h64_b8", 8, 1, 64, 512),
            _case("mla_prefill_h64_q64", 1, 64, 64, 512),
        ],
    )
]
