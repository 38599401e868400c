"""Small problems of every op with their expected results: what `cann_ops.verify` runs on a device, or in emulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import kernel_core
from cann_ops.ops import attention, experts, indexer, rows, streams
from cann_ops.reference.rows import split_window
from kernel_core import formats

Arguments = tuple[Any, ...]
Case = tuple[Callable[..., Any], Arguments, dict[str, Any], float]
"""An op, its arguments on the CPU, its options, and the largest difference allowed (0: bits equal)."""


def cases() -> dict[str, Case]:
    """A case an op, by the op's name. The numbers are the same every time."""
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=random, dtype=torch.int32)

    angles = normal(5, 32)
    rope = torch.cat((angles.cos(), angles.sin()), 1)
    window = _attention_case(normal, integers, rope)
    first = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    product = (
        *split_window(formats.quantize_window(normal(5, 256))),
        first,
        *formats.quantize_mxfp4(normal(3, 128, 256)),
    )
    key_pages = formats.index_page_from_rows(formats.quantize_index(normal(4, 64, 128))).contiguous()
    scored = (normal(5, 32, 128), normal(5, 32), key_pages, 64, integers(4, 2, 4), torch.tensor([0, 2, 5]).int(),
              torch.tensor([200, 3, 0, 64, 65]).int())  # fmt: skip
    pages, slots = torch.zeros(2, 64, 288, dtype=torch.uint8), torch.tensor([3, 127, -1, 0, 64])
    main = formats.quantize_main(normal(5, 512))
    index = formats.quantize_index(normal(5, 128))
    stream = (normal(5, 4, 256), normal(5, 256), normal(5, 4), normal(5, 4, 4))
    matrix = (normal(24, 1024) * 0.05, normal(24), normal(3))
    window_rows = window[1]
    ring = window[2].clone()
    placing = (window_rows, ring, *window[3:6], torch.zeros(2, dtype=torch.int64))
    return {
        "kv_rows": (rows.kv_rows, (normal(5, 512), None, 1.0, None), {"format": "main"}, 0),
        "norm_quantize": (rows.norm_quantize, (normal(5, 1024), None), {}, 0),
        "store_main": (rows.store_main, (main, pages, slots), {}, 0),
        "store_index": (rows.store_index, (index, torch.zeros(2, 64 * 68, dtype=torch.uint8), slots, 64), {}, 0),
        "store_window": (rows.store_window, placing, {}, 0),
        "gather_window": (attention.gather_window, window[1:8], {}, 0),
        "window_attention": (attention.window_attention, (*window[:8], *window[12:]), {}, 0.05),
        "sparse_attention": (attention.sparse_attention, window, {}, 0.05),
        "index_scores": (indexer.index_scores, scored, {"longest": 200}, 1e-3),
        "select_top": (indexer.select_top, (normal(5, 300), torch.tensor([300, 7, 0, 64, 299]).int(), 16), {}, 0),
        "route": (experts.route, (normal(5, 384), normal(384), 6), {}, 1e-6),
        "swiglu_quantize": (experts.swiglu_quantize, (normal(5, 512), normal(5)), {}, 0),
        "mx_linear": (experts.mx_linear, product, {}, 1e-3),
        "hc_update": (streams.hc_update, stream, {}, 1e-4),
        "hc_mix": (streams.hc_mix, (stream[0], stream[2], normal(256)), {}, 1e-4),
        "hc_coefficients": (streams.hc_coefficients, (stream[0], *matrix), {}, 1e-4),
    }


def _attention_case(normal: Callable[..., Any], integers: Callable[..., Any], rope: torch.Tensor) -> Arguments:
    """Two requests of 2 and 3 rows, a window of 60 and 20 selected rows; 32 heads."""
    ring = formats.quantize_window(normal(2, 64, 512))
    return (
        normal(5, 32, 512), formats.quantize_window(normal(5, 512)), ring, torch.tensor([1, 0]).int(),
        torch.tensor([0, 2, 5]).int(), torch.tensor([70, 3]), torch.zeros(2, dtype=torch.int64), 60,
        formats.quantize_main(normal(4, 16, 512)), 16, torch.tensor([[2, 0], [1, 3]]).int(), integers(33, 5, 20) - 1,
        normal(32), rope, 1 / math.sqrt(512),
    )  # fmt: skip


def run(case: Case, device: str) -> list[torch.Tensor]:
    """Results of a case on a device, back on the CPU; of an op that returns nothing, its changed arguments."""
    op, arguments, options, _ = case
    given = [a.clone().to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    made = op(*given, **options)
    if made is None:
        return [a.cpu() for a in given if isinstance(a, torch.Tensor)]
    parts = made if isinstance(made, tuple) else (made,)
    return [part.cpu() for part in parts if part is not None]


def worst(case: Case, found: list[torch.Tensor]) -> float:
    """The largest difference from the reference; 0 for equal bits, infinite where infinities or NaN differ."""
    with kernel_core.using("reference"):
        expected = run(case, "cpu")
    worst_yet = 0.0
    for value, wanted in zip(found, expected, strict=True):
        a, b = (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (value, wanted))
        difference = torch.where(a == b, 0.0, (a.double() - b.double()).abs()).nan_to_num(nan=torch.inf)
        worst_yet = max(worst_yet, float(difference.max()) if difference.numel() else 0.0)
    return worst_yet
