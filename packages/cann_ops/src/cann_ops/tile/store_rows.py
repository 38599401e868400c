"""Cache rows to their slots: DMA alone, a row (or its codes and its scales) at a time.

A page is `uint8[page bytes]`. Rows that keep their scales beside their codes are one piece; an index page has the codes
of all its rows first, then their scales, and a row is two pieces.
"""

from typing import Any

import tilelang.ascend.language as T

from cann_ops.tile.cores import VECTOR_CORES

ROWS = 32  # of a tile


def program(code_bytes: int, scale_bytes: int, rows_per_block: int) -> Any:
    """rows uint8 [n, code + scale bytes], slots int32 [n] (block · rows_per_block + offset; others are skipped),
    pages uint8 [blocks, rows_per_block · (code + scale bytes)], changed."""
    if code_bytes < 1 or (code_bytes % 32 and scale_bytes) or rows_per_block < 1 or scale_bytes < 0:
        raise ValueError(
            f"code_bytes, scale_bytes, rows_per_block: got {code_bytes}, {scale_bytes}, {rows_per_block}, allowed are "
            "positive sizes, and codes of a multiple of 32 bytes before scales"
        )
    row = code_bytes + scale_bytes
    pitch = -(-row // 32) * 32
    scales_at = rows_per_block * code_bytes
    n, blocks = T.dynamic("n"), T.dynamic("blocks")

    @T.prim_func
    def store_rows(
        rows: T.Tensor[(n, row), T.uint8],
        slots: T.Tensor[(n,), T.int32],
        pages: T.Tensor[(blocks, rows_per_block * row), T.uint8],
    ):
        with T.Kernel(VECTOR_CORES) as core:
            here = T.alloc_shared((ROWS, pitch), T.uint8)
            slot_ub = T.alloc_shared((ROWS,), T.int32)
            for tile in T.Persistent([T.ceildiv(n, ROWS)], VECTOR_CORES, core, group_size=1, num_stages=2):
                T.copy(slots[tile * ROWS], slot_ub)
                T.copy(rows[tile * ROWS, 0], here[:, :row])
                for r in T.serial(T.min(ROWS, n - tile * ROWS)):
                    slot = T.alloc_var(T.int32, init=slot_ub[r])
                    if slot >= 0 and slot < blocks * rows_per_block:
                        block = slot // rows_per_block
                        place = slot % rows_per_block
                        T.copy(
                            here[r, :code_bytes],
                            pages[block, place * code_bytes : place * code_bytes + code_bytes],
                        )
                        if scale_bytes > 0:
                            T.copy(
                                here[r, code_bytes:row],
                                pages[
                                    block,
                                    scales_at + place * scale_bytes : scales_at + place * scale_bytes + scale_bytes,
                                ],
                            )

    return store_rows
