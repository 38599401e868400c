"""Cache rows and their way into pages."""

from __future__ import annotations

import torch

from kernel_core import formats
from mla_fp4.reference.norm import rms_norm, rotate

_QUANTIZE = {
    "main": formats.quantize_main,
    "window": formats.quantize_window,
    "index": formats.quantize_index,
}


def kv_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor | None,
    *,
    format: str = "main",
    quantize: bool = True,
    round_bf16: bool = False,
) -> torch.Tensor:
    """Norm, rotation, quantisation: see `mla_fp4.kv_rows`."""
    y = rms_norm(x, weight, eps)
    if round_bf16:
        y = y.bfloat16().float()
    y = rotate(y, rope)
    if round_bf16:
        y = y.bfloat16().float()
    return _QUANTIZE[format](y) if quantize else y


def store_main(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Write row i to slot slots[i]; -1 skips: see `mla_fp4.store_main`."""
    kept = slots >= 0
    pages.view(-1, pages.shape[-1])[slots[kept]] = rows[kept]


def store_index(rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rows_per_block: int) -> None:
    """The same into pages that hold codes and scales apart: see `mla_fp4.store_index`."""
    if pages.dtype == torch.float32:
        return store_main(rows, pages, slots)
    kept = slots >= 0
    block, offset = slots[kept] // rows_per_block, slots[kept] % rows_per_block
    codes, scales = formats.split_index_page(pages, rows_per_block)
    codes[block, offset] = rows[kept][:, : codes.shape[-1]]
    scales[block, offset] = rows[kept][:, codes.shape[-1] :]
    return None
