"""Paged index caches and ragged batches for the indexer's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kernel_core import formats
from kernel_core.testing import poison, poisoned

Case = dict[str, Any]


def _build(
    lengths: Sequence[int],
    visible: Sequence[int],
    *,
    heads: int = 4,
    dim: int = 32,
    rows_per_block: int = 64,
    packed: bool = True,
    seed: int = 0,
) -> Case:
    """Request b has lengths[b] rows; row t sees visible[t] keys. What no row sees is NaN bytes or garbage ids."""
    g = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = [max(visible[cu[b] : cu[b + 1]], default=0) for b in range(len(lengths))]
    used = [-(-n // rows_per_block) for n in longest]
    blocks = 1 + sum(used) + 2
    ids = (1 + torch.randperm(blocks - 1, generator=g)).int()
    table = torch.full((len(lengths), max(used, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    keys = torch.randn(blocks, rows_per_block, dim, generator=g)
    row_bytes = dim // 2 + dim // 32
    pages = (
        poisoned((blocks, rows_per_block * row_bytes), torch.uint8)
        if packed
        else poisoned((blocks, rows_per_block, dim), torch.float32)
    )
    for b, count in enumerate(used):
        table[b, :count] = ids[sum(used[:b]) :][:count]
        for i in range(count):
            block, filled = int(table[b, i]), min(rows_per_block, longest[b] - i * rows_per_block)
            if packed:
                codes, scales = formats.split_index_page(pages[block], rows_per_block)
                rows = formats.quantize_index(keys[block, :filled])
                codes[:filled], scales[:filled] = rows[:, : dim // 2], rows[:, dim // 2 :]
            else:
                pages[block, :filled] = keys[block, :filled]
    poison(pages[0])
    return {
        "q": torch.randn(sum(lengths), heads, dim, generator=g),
        "head_weights": torch.randn(sum(lengths), heads, generator=g),
        "pages": pages,
        "rows_per_block": rows_per_block,
        "block_table": table,
        "cu_seqlens": cu,
        "visible": torch.tensor(visible, dtype=torch.int32),
    }


@pytest.fixture
def index_case() -> Callable[..., Case]:
    return _build


def _rows(case: Case, rows: slice) -> Case:
    """The same problem for some rows of its only request."""
    part = {name: case[name][rows].contiguous() for name in ("q", "head_weights", "visible")}
    return case | part | {"cu_seqlens": torch.tensor([0, len(part["visible"])], dtype=torch.int32)}


@pytest.fixture
def take_rows() -> Callable[[Case, slice], Case]:
    return _rows


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers for a test whichever others run, and in whichever order."""
    torch.manual_seed(0)
