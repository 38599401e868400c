"""The semantics of swap-in in plain PyTorch, at once and on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gdr_swapin.layout import BlockLayout
from gdr_swapin.pools import PagedPools


def load_blocks(data: torch.Tensor, slots: Sequence[int], pools: PagedPools, blocks: Sequence[int]) -> None:
    """Block `slots[i]` of `data: uint8[slots, block_bytes]` into page `blocks[i]` of every pool."""
    layout = pools.layout
    rows = data[torch.as_tensor(slots, dtype=torch.int64)]
    pages = torch.as_tensor(blocks, dtype=torch.int64, device=pools.device)
    for i, (source, offset) in enumerate(zip(layout.layers, layout.offsets, strict=True)):
        middle, end = offset + source.index_bytes, offset + source.slice_bytes
        pools.index[i][pages] = rows[:, offset:middle].to(pools.device)
        main = rows[:, middle:end].unflatten(1, (source.rows, source.main_row_bytes))
        pools.main[i][pages] = main.to(pools.device)


def split_block(layout: BlockLayout, block: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Views of one block at rest: layer -> (index page, main rows `uint8[rows, 288]`)."""
    parts = {}
    for source, offset in zip(layout.layers, layout.offsets, strict=True):
        middle, end = offset + source.index_bytes, offset + source.slice_bytes
        main = block[middle:end].view(source.rows, source.main_row_bytes)
        parts[source.layer] = (block[offset:middle], main)
    return parts
