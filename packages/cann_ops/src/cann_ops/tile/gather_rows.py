"""Rows by their places, gathered next to each other: DMA alone, the window gather of a ring."""

from typing import Any

import tilelang.ascend.language as T

from cann_ops.tile.cores import VECTOR_CORES

ROWS = 32  # of a tile


def program(row: int) -> Any:
    """rows uint8 [m, row], places int32 [n] (-1 and what is out of range give zeros), nothing uint8 [row], zeros; out
    uint8 [n, row]."""
    if not 1 <= row <= 2048:
        raise ValueError(f"row: got {row}, allowed are 1 to 2048 bytes")
    pitch = -(-row // 32) * 32
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def gather_rows(
        rows: T.Tensor[(m, row), T.uint8],
        places: T.Tensor[(n,), T.int32],
        nothing: T.Tensor[(row,), T.uint8],
        out: T.Tensor[(n, row), T.uint8],
    ):
        with T.Kernel(VECTOR_CORES) as core:
            here = T.alloc_shared((ROWS, pitch), T.uint8)
            place_ub = T.alloc_shared((ROWS,), T.int32)
            for tile in T.Persistent([T.ceildiv(n, ROWS)], VECTOR_CORES, core, group_size=1, num_stages=2):
                T.copy(places[tile * ROWS], place_ub)
                for r in T.serial(T.min(ROWS, n - tile * ROWS)):
                    place = T.alloc_var(T.int32, init=place_ub[r])
                    if place >= 0 and place < m:
                        T.copy(rows[place, :], here[r, :row])
                    else:
                        T.copy(nothing[0:row], here[r, :row])
                T.copy(here[:, :row], out[tile * ROWS, 0])

    return gather_rows
