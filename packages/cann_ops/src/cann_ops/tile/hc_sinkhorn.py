"""Coefficients of a hyper-connection from its products: sigmoids, and a 4 x 4 matrix made doubly stochastic.

A thread a row: the steps are few and depend on each other. Sums are taken in the order of the index. Threads behind the
last row work on what lies there; nothing of it is stored.
"""

from typing import Any

import tilelang.ascend.language as T

from cann_ops.tile.cores import VECTOR_CORES

ROWS = 128  # threads
_LOG2E = 1.4426950408889634


def program(iters: int) -> Any:
    """m float32 [n, 32] (24 count: pre, post, comb), squares float32 [n] with width float32 (4 · d), base float32 [24],
    scale float32 [8] (3 count), norm_eps, hc_eps float32; coefficients float32 [n, 24]."""
    if not 1 <= iters <= 64:
        raise ValueError(f"iters: got {iters}, allowed is 1 to 64")
    n = T.dynamic("n")

    @T.prim_func
    def hc_sinkhorn(
        m: T.Tensor[(n, 32), T.float32],
        squares: T.Tensor[(n,), T.float32],
        base: T.Tensor[(24,), T.float32],
        scale: T.Tensor[(8,), T.float32],
        coefficients: T.Tensor[(n, 24), T.float32],
        width: T.float32,
        norm_eps: T.float32,
        hc_eps: T.float32,
    ):
        with T.Kernel(VECTOR_CORES) as core:
            value = T.alloc_shared((ROWS, 32), T.float32)
            square = T.alloc_shared((ROWS,), T.float32)
            bias = T.alloc_shared((24,), T.float32)
            factor = T.alloc_shared((8,), T.float32)
            result = T.alloc_shared((ROWS, 24), T.float32)
            T.copy(base, bias)
            T.copy(scale, factor)
            for tile in T.Persistent([T.ceildiv(n, ROWS)], VECTOR_CORES, core, group_size=1, num_stages=1):
                T.copy(m[tile * ROWS, 0], value)
                T.copy(squares[tile * ROWS], square)
                with T.SimtVF(threads=ROWS):
                    r = T.get_thread_binding(0)
                    inverse = T.alloc_var(T.float32, init=1.0 / T.sqrt(square[r] / width + norm_eps))
                    for j in T.serial(4):
                        z = T.alloc_var(T.float32, init=value[r, j] * inverse * factor[0] + bias[j])
                        result[r, j] = 1.0 / (1.0 + T.exp2(-z * _LOG2E)) + hc_eps
                        z = value[r, 4 + j] * inverse * factor[1] + bias[4 + j]
                        result[r, 4 + j] = 2.0 / (1.0 + T.exp2(-z * _LOG2E))
                    for i in T.serial(4):
                        top = T.alloc_var(T.float32, init=-T.infinity(T.float32))
                        for j in T.serial(4):
                            z = T.alloc_var(T.float32, init=0.0)
                            z = value[r, 8 + 4 * i + j] * inverse * factor[2] + bias[8 + 4 * i + j]
                            result[r, 8 + 4 * i + j] = z
                            top = T.max(top, z)
                        total = T.alloc_var(T.float32, init=0.0)
                        for j in T.serial(4):
                            e = T.alloc_var(T.float32, init=T.exp2((result[r, 8 + 4 * i + j] - top) * _LOG2E))
                            result[r, 8 + 4 * i + j] = e
                            total = total + e
                        for j in T.serial(4):
                            result[r, 8 + 4 * i + j] = result[r, 8 + 4 * i + j] / total + hc_eps
                    for step in T.serial(2 * iters - 1):
                        for a in T.serial(4):  # columns in even steps, rows in odd ones
                            total = T.alloc_var(T.float32, init=0.0)
                            for b in T.serial(4):
                                at = T.if_then_else(step % 2 == 0, 8 + 4 * b + a, 8 + 4 * a + b)
                                total = total + result[r, at]
                            for b in T.serial(4):
                                at = T.if_then_else(step % 2 == 0, 8 + 4 * b + a, 8 + 4 * a + b)
                                result[r, at] = result[r, at] / (total + hc_eps)
                T.copy(result, coefficients[tile * ROWS, 0])

    return hc_sinkhorn
