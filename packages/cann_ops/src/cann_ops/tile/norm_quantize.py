"""RMSNorm and quantisation of wide activations to E4M3 with UE8M0 scales of 32 values: the input of MX products."""

from typing import Any

import tilelang.ascend.language as T

from cann_ops.tile import quantise as Q
from cann_ops.tile.cores import VECTOR_CORES

TILE_BYTES = 96 * 1024  # of float32 rows, of which two tiles lie in the unified buffer
MOST = 8192  # channels


def program(D: int, norm: bool) -> Any:
    """x float32 [n, D], weight float32 [D], eps float32, codes uint8 [n, D] (E4M3), scales uint8 [n, D / 32]."""
    if D % 1024 or not 1024 <= D <= MOST:
        raise ValueError(f"D: got {D}, allowed are multiples of 1024 up to {MOST}")
    rows = min(16, TILE_BYTES // (4 * D))
    n = T.dynamic("n")

    @T.prim_func
    def norm_quantize(
        x: T.Tensor[(n, D), T.float32],
        weight: T.Tensor[(D,), T.float32],
        codes: T.Tensor[(n, D), T.uint8],
        scales: T.Tensor[(n, D // 32), T.uint8],
        eps: T.float32,
    ):
        with T.Kernel(VECTOR_CORES) as core:
            y = T.alloc_shared((rows, D), T.float32)
            w = T.alloc_shared((D,), T.float32)
            tops = T.alloc_shared((rows, D // 16), T.float32)
            inverse = T.alloc_shared((rows, D // 16), T.float32)
            code = T.alloc_shared((rows, D), T.uint8)
            scale = T.alloc_shared((rows, D // 32), T.uint8)
            if norm:
                T.copy(weight, w)
            for tile in T.Persistent([T.ceildiv(n, rows)], VECTOR_CORES, core, group_size=1, num_stages=2):
                T.copy(x[tile * rows, 0], y)
                here = T.alloc_var(T.int32, init=T.min(rows, n - tile * rows))
                with T.SimdVF():
                    if norm:
                        Q.norm_rows(y, here, D, w, eps)
                    Q.quantise_rows(y, here, D, "window", tops, inverse, code, scale, 0)
                T.copy(code, codes[tile * rows, 0])
                T.copy(scale, scales[tile * rows, 0])

    return norm_quantize
