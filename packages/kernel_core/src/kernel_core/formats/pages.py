"""Index pages: the codes of all rows first, then the scales of all rows.

A page of P rows of width D is `uint8[P * (D/2 + D/32)]`: P*D/2 code bytes, then P*D/32 scale bytes. Main and window
rows keep their scales beside them and need no such helpers.
"""

from __future__ import annotations

import torch

from kernel_core import check
from kernel_core.formats.rows import index_row_width


def split_index_page(page: torch.Tensor, rows_per_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`uint8[..., P*bytes]` to codes `uint8[..., P, D/2]` and scales `uint8[..., P, D/32]`; views, no copy."""
    size = page.shape[-1]
    check.require(rows_per_block > 0 and size % rows_per_block == 0, "page", f"{size} bytes",
                  f"a multiple of rows_per_block = {rows_per_block}")  # fmt: skip
    width = index_row_width(size // rows_per_block)
    split = rows_per_block * width // 2
    codes = page[..., :split].unflatten(-1, (rows_per_block, width // 2))
    return codes, page[..., split:].unflatten(-1, (rows_per_block, width // 32))


def join_index_page(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_index_page`: a new page `uint8[..., P*bytes]`."""
    check.require(codes.shape[:-1] == scales.shape[:-1] and codes.shape[-1] == 16 * scales.shape[-1], "scales",
                  f"shape {list(scales.shape)}", f"one byte for 16 code bytes of {list(codes.shape)}")  # fmt: skip
    return torch.cat((codes.flatten(-2), scales.flatten(-2)), dim=-1)


def index_page_rows(page: torch.Tensor, rows_per_block: int) -> torch.Tensor:
    """A page as separate keys `uint8[..., P, D/2 + D/32]`, codes then scales, as `dequantize_index` takes them."""
    return torch.cat(split_index_page(page, rows_per_block), dim=-1)


def index_page_from_rows(rows: torch.Tensor) -> torch.Tensor:
    """Keys `uint8[..., P, D/2 + D/32]` to one page `uint8[..., P*(D/2 + D/32)]`."""
    width = index_row_width(rows.shape[-1])
    return join_index_page(rows[..., : width // 2], rows[..., width // 2 :])
