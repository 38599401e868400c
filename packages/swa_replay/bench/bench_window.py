"""Window attention and the store of a step's rows, at the heads of the small model (4) and the released one (64)."""

from __future__ import annotations

import functools

import torch

import swa_replay
from kernel_core import formats, using
from kernel_core.bench import Bench, Case, Problem

DIM, ROPE, WINDOW, RING, START = 512, 64, 128, 134, 8192
NOTE = "float32 result; with AMX by three exact bfloat16 products, so a fraction can pass the float32 bound"


def _arguments(requests: int, rows: int, heads: int) -> dict[str, object]:
    g = torch.Generator().manual_seed(requests * rows)
    total = requests * rows
    return {
        "q": torch.randn(total, heads, DIM, generator=g),
        "new_rows": formats.quantize_window(torch.randn(total, DIM, generator=g)),
        "ring": formats.quantize_window(torch.randn(requests + 1, RING, DIM, generator=g)),
        "ring_slot": torch.arange(1, requests + 1).int(),
        "cu_seqlens": torch.arange(0, total + 1, rows).int(),
        "start_pos": torch.full((requests,), START),
        "lower": torch.zeros(requests).long(),
        "window": WINDOW,
        "sink": torch.randn(heads, generator=g),
        "rope": torch.randn(total, ROPE, generator=g),
        "scale": DIM**-0.5,
    }


def _attention(requests: int, rows: int, heads: int) -> Problem:
    arguments = _arguments(requests, rows, heads)
    total = requests * rows
    out = torch.empty(total, heads, DIM)

    def reference() -> torch.Tensor:
        with using("reference"):
            return swa_replay.window_attention(**arguments)

    def check() -> None:
        torch.testing.assert_close(out, reference(), atol=1e-5, rtol=1e-5)

    return Problem(
        native=functools.partial(swa_replay.window_attention, **arguments, out=out),
        reference=reference,
        bytes=(requests * (WINDOW - 1) + total) * 528 + 2 * out.numel() * 4,
        flops=4 * total * heads * DIM * WINDOW,
        check=check,
        note=NOTE,
    )


def _store(requests: int, rows: int) -> Problem:
    arguments = _arguments(requests, rows, 1)
    named = {k: arguments[k] for k in ("new_rows", "ring", "ring_slot", "cu_seqlens", "start_pos")}
    named["floor"] = torch.zeros(requests).long()

    def reference() -> None:
        with using("reference"):
            swa_replay.store_window(**named)

    return Problem(
        native=functools.partial(swa_replay.store_window, **named),
        reference=reference,
        bytes=2 * requests * min(rows, RING) * 528,
        flops=0,
    )


def _shape(requests: int, rows: int, **more: int) -> dict[str, int]:
    return {"requests": requests, "rows": rows, **more, "dim": DIM, "window": WINDOW}


BENCHES = [
    Bench(
        "swa_replay.window_attention",
        [
            Case(point, _shape(b, n, heads=h), functools.partial(_attention, b, n, h))
            for point, b, n, h in (
                ("window_decode_h4_b1", 1, 1, 4),
                ("window_decode_h4_b16", 16, 1, 4),
                ("window_prefill_h4_q512", 1, 512, 4),
                ("window_decode_h64_b1", 1, 1, 64),
                ("window_prefill_h64_q64", 1, 64, 64),
            )
        ],
    ),
    Bench(
        "swa_replay.store_window",
        [
            Case(point, _shape(b, n), functools.partial(_store, b, n))
            for point, b, n in (("window_store_b16", 16, 1), ("window_store_q512", 1, 512))
        ],
    ),
]
