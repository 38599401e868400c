"""Products of all streams of a row with the rows of the hyper-connection matrix, float32 on the cube."""

from typing import Any

import tilelang.ascend.language as T

from cann_ops.tile.cores import CUBE_CORES

OUTPUTS = 32  # 24, and rows of zeros
ROWS = 32  # of a tile
DEPTH = 256


def program(width: int) -> Any:
    """u float32 [n, width] (4 · d), fn float32 [32, width], of which 24 rows count; m float32 [n, 32]."""
    if width % DEPTH or width < DEPTH:
        raise ValueError(f"width: got {width}, allowed are multiples of {DEPTH}")
    n = T.dynamic("n")

    @T.prim_func
    def hc_products(
        u: T.Tensor[(n, width), T.float32],
        fn: T.Tensor[(OUTPUTS, width), T.float32],
        m: T.Tensor[(n, OUTPUTS), T.float32],
    ):
        with T.MixedKernel(CUBE_CORES) as (core, sid):
            a = T.alloc_l1((ROWS, DEPTH), T.float32)
            b = T.alloc_l1((OUTPUTS, DEPTH), T.float32)
            c = T.alloc_l0c((ROWS, OUTPUTS), T.float32)
            part = T.alloc_shared((ROWS // 2, OUTPUTS), T.float32)
            tiles = T.ceildiv(n, ROWS)
            for task in T.serial(T.ceildiv(tiles - core, CUBE_CORES)):
                row = T.alloc_var(T.int32, init=(task * CUBE_CORES + core) * ROWS)
                for k in T.serial(width // DEPTH):
                    T.copy(u[row : row + ROWS, k * DEPTH : (k + 1) * DEPTH], a)
                    T.copy(fn[:, k * DEPTH : (k + 1) * DEPTH], b)
                    T.gemm(a, b, c, transpose_B=True, clear_accum=(k == 0))
                T.dual_copy(c, part)
                T.copy(part, m[row + sid * (ROWS // 2) : row + sid * (ROWS // 2) + ROWS // 2, :])

    return hc_products
