"""Product of E4M3 rows with MXFP4 or MXFP8 weights, grouped by expert: block-scaled, on the cube.

The cube multiplies operands of one kind, so E2M1 codes become the E4M3 codes of the same numbers (exact) on the way
through the unified buffer of the vector cores; their scales go to the cube as they are. E4M3 weights go there directly.
A block takes 128 output columns of an expert, and rows of that expert in tiles. The order of the sum is that of the
columns of the weight, whatever the tile, so a row's bits do not depend on its neighbours.
"""

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S
from tilelang.layout import make_ascend_compact_nz_layout

from cann_ops.tile.cores import CUBE_CORES

FP8 = "float8_e4m3fn"
COLUMNS = 128  # of the result in a tile
HALF = COLUMNS // 2
DEPTH = 256  # values that a step adds up


@T.macro
def widen_codes(packed, codes):
    """Bytes of two E2M1 codes to E4M3 codes of the same values: 128 of a row at a time."""
    for r in T.serial(T.uint16(HALF)):
        for c in T.serial(T.uint16(DEPTH // 128)):
            code = T.reinterpret(S.vld(packed[r, c * 64], dist="UNPK4_B8"), "float4_e2m1fnx512")
            value = S.vcvt(code, T.bfloat16, part=0)
            even = S.vcvt(S.vcvt(value, T.float32, part=0), FP8, part=0)
            odd = S.vcvt(S.vcvt(value, T.float32, part=1), FP8, part=1)
            both = S.vor(T.reinterpret(even, "uint32x64"), T.reinterpret(odd, "uint32x64"))
            S.vsts(codes[r, c * 128], both, dist="PK_B32", extent=128)


def program(rows: int, N: int, K: int, e2m1: bool) -> Any:
    """x_codes float8_e4m3fn [n, K], x_scales int16 [n, K / 64] (two UE8M0 bytes), first int32 [e + 1]: rows of expert i
    are first[i] to first[i + 1] - 1; codes uint8 [e, N, K / 2] (E2M1) or, without `e2m1`, wide float8_e4m3fn [e, N, K];
    scales int16 [e, N, K / 64]; y float32 [n, N].
    """
    if rows not in (16, 32, 64, 128) or N % COLUMNS or K % DEPTH or min(N, K) < 1:
        raise ValueError(f"rows, N, K: got {rows}, {N}, {K}, allowed are 16 to 128, multiples of {COLUMNS} and {DEPTH}")
    n, e, bounds = T.dynamic("n"), T.dynamic("e"), T.dynamic("bounds")
    parts = N // COLUMNS

    @T.prim_func
    def mx_linear(
        x_codes: T.Tensor[(n, K), FP8],
        x_scales: T.Tensor[(n, K // 64), T.int16],
        first: T.Tensor[(bounds,), T.int32],
        codes: T.Tensor[(e, N, K // 2), T.uint8],
        wide: T.Tensor[(e, N, K), FP8],
        scales: T.Tensor[(e, N, K // 64), T.int16],
        y: T.Tensor[(n, N), T.float32],
    ):
        with T.MixedKernel(CUBE_CORES) as (core, sid):
            x_l1 = T.alloc_l1((rows, DEPTH), FP8)
            x_sf = T.alloc_l1((rows, DEPTH // 64), T.int16)
            w_l1 = T.alloc_l1((COLUMNS, DEPTH), FP8)
            w_sf = T.alloc_l1((COLUMNS, DEPTH // 64), T.int16)
            product = T.alloc_l0c((rows, COLUMNS), T.float32)
            part = T.alloc_shared((rows // 2, COLUMNS), T.float32)
            packed = T.alloc_shared((HALF, DEPTH // 2), T.uint8)
            spread = T.alloc_shared((HALF, DEPTH), T.uint8)
            pairs = T.view(spread, (HALF, DEPTH // 2), T.bfloat16)
            pairs_nz = T.alloc_shared((HALF + 1, DEPTH // 2), T.bfloat16)
            T.annotate_layout({pairs_nz: make_ascend_compact_nz_layout(pairs_nz)})
            # L0C goes out whole, through the vector cores: a partial tile would be read with a stride of its own rows.
            for task in T.serial(T.ceildiv(e * parts - core, CUBE_CORES)):
                expert = T.alloc_var(T.int32, init=(task * CUBE_CORES + core) // parts)
                column = T.alloc_var(T.int32, init=(task * CUBE_CORES + core - expert * parts) * COLUMNS)
                start = T.alloc_var(T.int32, init=first[expert])
                end = T.alloc_var(T.int32, init=first[expert + 1])
                for tile in T.serial(T.ceildiv(end - start, rows)):
                    row = start + tile * rows
                    for k in T.serial(K // DEPTH):
                        if e2m1:
                            T.copy(codes[expert, column + sid * HALF : column + sid * HALF + HALF,
                                         k * (DEPTH // 2) : (k + 1) * (DEPTH // 2)], packed)  # fmt: skip
                            with T.SimdVF():
                                widen_codes(packed, spread)
                            T.copy(pairs, pairs_nz[:HALF, :])
                            # TileLang moves no 8-bit operand from a vector core to the cube's memory: as 16-bit pairs
                            # the same bytes lie the same way there.
                            T.ascend_nd2nz_post_copy(
                                T.access_ptr(w_l1[sid * HALF, 0], "w", extent=HALF * DEPTH),
                                T.access_ptr(pairs_nz[0, 0], "r", extent=(HALF + 1) * DEPTH // 2),
                                HALF, DEPTH // 2, COLUMNS, "bfloat16_t",
                            )  # fmt: skip
                        else:
                            T.copy(wide[expert, column : column + COLUMNS, k * DEPTH : (k + 1) * DEPTH], w_l1)
                        T.copy(scales[expert, column : column + COLUMNS, k * (DEPTH // 64) : (k + 1) * (DEPTH // 64)],
                               w_sf)  # fmt: skip
                        T.copy(x_codes[row : row + rows, k * DEPTH : (k + 1) * DEPTH], x_l1)
                        T.copy(x_scales[row : row + rows, k * (DEPTH // 64) : (k + 1) * (DEPTH // 64)], x_sf)
                        T.gemm_blockscaled(x_l1, w_l1, product, x_sf, w_sf, transpose_B=True, clear_accum=(k == 0))
                    T.dual_copy(product, part)
                    mine = T.alloc_var(T.int32, init=T.max(T.min(rows // 2, end - row - sid * (rows // 2)), 0))
                    T.copy(
                        part[:mine, :],
                        y[row + sid * (rows // 2) : row + sid * (rows // 2) + mine, column : column + COLUMNS],
                    )

    return mx_linear
