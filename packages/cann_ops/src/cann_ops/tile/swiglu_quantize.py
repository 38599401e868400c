"""Clamped SwiGLU, the routing weight and quantisation in one pass: from the first product of an expert to the second.

The gate is clamped from above, the up part on both sides; silu(g) is g / (1 + e^-g). The division is the exact one.
"""

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S

from cann_ops.tile import quantise as Q
from cann_ops.tile.cores import VECTOR_CORES

ROWS = 4  # of a tile


def program(inter: int) -> Any:
    """gate_up float32 [n, 2 I] (gate, then up), weights float32 [n], limit float32; codes uint8 [n, I] (E4M3),
    scales uint8 [n, I / 32]."""
    if inter % 128 or not 128 <= inter <= 4096:
        raise ValueError(f"inter: got {inter}, allowed are multiples of 128 up to 4096")
    groups = -(-inter // 1024) * 64  # of 16 values, in whole vectors
    n = T.dynamic("n")

    @T.prim_func
    def swiglu_quantize(
        gate_up: T.Tensor[(n, 2 * inter), T.float32],
        weights: T.Tensor[(n,), T.float32],
        codes: T.Tensor[(n, inter), T.uint8],
        scales: T.Tensor[(n, inter // 32), T.uint8],
        limit: T.float32,
    ):
        with T.Kernel(VECTOR_CORES) as core:
            both = T.alloc_shared((ROWS, 2 * inter), T.float32)
            y = T.alloc_shared((ROWS, inter), T.float32)
            tops = T.alloc_shared((ROWS, groups), T.float32)
            inverse = T.alloc_shared((ROWS, groups), T.float32)
            code = T.alloc_shared((ROWS, inter), T.uint8)
            scale = T.alloc_shared((ROWS, groups // 2), T.uint8)
            factor = T.alloc_shared((8,), T.float32)
            for tile in T.Persistent([T.ceildiv(n, ROWS)], VECTOR_CORES, core, group_size=1, num_stages=2):
                T.copy(gate_up[tile * ROWS, 0], both)
                T.copy(weights[tile * ROWS : tile * ROWS + ROWS], factor[0:ROWS])
                here = T.alloc_var(T.int32, init=T.min(ROWS, n - tile * ROWS))
                with T.SimdVF():
                    for r in T.serial(T.uint16(here)):
                        weight = S.vld(factor[r], dist="BRC_B32")
                        for c in T.serial(T.uint16(inter // 64)):
                            gate = S.vmins(S.vld(both[r, c * 64]), limit)
                            up = S.vmaxs(S.vmins(S.vld(both[r, inter + c * 64]), limit), -limit)
                            below = S.vadds(S.vexp(S.vmuls(gate, -1.0)), 1.0)
                            silu = S.vdiv(gate, below, precision="exact")
                            S.vsts(y[r, c * 64], S.vmul(S.vmul(silu, up), weight))
                    S.mem_bar("VST_VLD")
                    Q.quantise_rows(y, here, inter, "window", tops, inverse, code, scale, 0)
                T.copy(code, codes[tile * ROWS, 0])
                T.copy(scale[:, : inter // 32], scales[tile * ROWS, 0])

    return swiglu_quantize
