"""RMSNorm, rotation and quantisation of cache rows: `kv_rows` of the three formats, on vector cores.

A tile of 32 rows goes through the unified buffer. Three passes over it: the norm and the rotation, in place; the
largest magnitude of each 16 values, and from it the scale bytes and their reciprocals; the codes.
"""

from typing import Any

import tilelang.ascend.language as T

from cann_ops.tile import quantise as Q
from cann_ops.tile.cores import VECTOR_CORES

ROWS = 32  # of a tile
ROPE = 64  # channels that turn, if any do
_ROW_BYTES = {"main": lambda d: d // 2 + d // 16, "window": lambda d: d + d // 32, "index": lambda d: d // 2 + d // 32}


def program(format: str, D: int, norm: bool, rope: bool, round_bf16: bool) -> Any:
    """x float32 [n, D], weight float32 [D], rope float32 [n, 64], eps float32, rows uint8 [n, row bytes].

    The kernel has no parameter for what it leaves out (weight, eps without norm; rope without rotation).
    """
    if format not in _ROW_BYTES or D not in (128, 256, 512):
        raise ValueError(
            f"format, D: got {format!r}, {D}, allowed are {list(_ROW_BYTES)} with 128, 256 or 512 channels"
        )
    row_bytes = _ROW_BYTES[format](D)
    pitch = -(-row_bytes // 32) * 32  # vectors are stored at multiples of 32 bytes
    values = D if format == "window" else D // 2
    n = T.dynamic("n")

    @T.prim_func
    def kv_rows(
        x: T.Tensor[(n, D), T.float32],
        weight: T.Tensor[(D,), T.float32],
        turns: T.Tensor[(n, ROPE), T.float32],
        rows: T.Tensor[(n, row_bytes), T.uint8],
        eps: T.float32,
    ):
        with T.Kernel(VECTOR_CORES) as core:
            y = T.alloc_shared((ROWS, D), T.float32)
            w = T.alloc_shared((D,), T.float32)
            turn = T.alloc_shared((ROWS, ROPE), T.float32)
            tops = T.alloc_shared((ROWS, 64), T.float32)
            inverse = T.alloc_shared((ROWS, 64), T.float32)
            out = T.alloc_shared((ROWS, pitch), T.uint8)
            if norm:
                T.copy(weight, w)
            for tile in T.Persistent([T.ceildiv(n, ROWS)], VECTOR_CORES, core, group_size=1, num_stages=2):
                T.copy(x[tile * ROWS, 0], y)
                if rope:
                    T.copy(turns[tile * ROWS, 0], turn)
                here = T.alloc_var(T.int32, init=T.min(ROWS, n - tile * ROWS))
                with T.SimdVF():
                    if norm:
                        Q.norm_rows(y, here, D, w, eps)
                    if round_bf16:
                        Q.round_bf16(y, here, 0, D)
                    if rope:
                        Q.turn_rows(y, here, D, turn)
                        if round_bf16:
                            Q.round_bf16(y, here, D - ROPE, D)
                    Q.quantise_rows(y, here, D, format, tops, inverse, out, out, values)
                T.copy(out[:, :row_bytes], rows[tile * ROWS, 0])

    return kv_rows
