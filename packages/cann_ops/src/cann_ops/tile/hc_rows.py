"""Hyper-connection streams of a row: the update by a layer's output, the mix into the next input, and its norm.

The four streams of a row lie in the unified buffer together, so that each is read from memory once and written once.
"""

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S

from cann_ops.tile.cores import VECTOR_CORES

STREAMS = 4


def program(d: int, update: bool, mix: bool, norm: bool) -> Any:
    """X float32 [n, 4, d]; update: y float32 [n, d], post float32 [n, 4], comb float32 [n, 16] (source, destination):
    X[j] = post[j] · y + sum over i of comb[i][j] · X[i], in place; mix: pre float32 [n, 4], norm: weight float32 [d],
    eps float32; out float32 [n, d]. squares float32 [n]: the sum of the new X², with the update or the mix.
    """
    if d % 64 or not 64 <= d <= 8192 or not (update or mix):
        raise ValueError(
            f"d, update, mix: got {d}, {update}, {mix}, allowed are multiples of 64 up to 8192, one or both"
        )
    n = T.dynamic("n")

    @T.prim_func
    def hc_rows(
        X: T.Tensor[(n, STREAMS, d), T.float32],
        y: T.Tensor[(n, d), T.float32],
        post: T.Tensor[(n, STREAMS), T.float32],
        comb: T.Tensor[(n, STREAMS * STREAMS), T.float32],
        pre: T.Tensor[(n, STREAMS), T.float32],
        weight: T.Tensor[(d,), T.float32],
        out: T.Tensor[(n, d), T.float32],
        squares: T.Tensor[(n,), T.float32],
        eps: T.float32,
    ):
        with T.Kernel(VECTOR_CORES) as core:
            x = T.alloc_shared((STREAMS, d), T.float32)
            given = T.alloc_shared((d,), T.float32)
            mixed = T.alloc_shared((d,), T.float32)
            w = T.alloc_shared((d,), T.float32)
            to_post = T.alloc_shared((8,), T.float32)
            to_comb = T.alloc_shared((16,), T.float32)
            to_pre = T.alloc_shared((8,), T.float32)
            square = T.alloc_shared((8,), T.float32)
            if norm:
                T.copy(weight, w)
            for task in T.serial(T.ceildiv(n - core, VECTOR_CORES)):
                t = T.alloc_var(T.int32, init=task * VECTOR_CORES + core)
                T.copy(X[t, :, :], x)
                if update:
                    T.copy(y[t, :], given)
                    T.copy(post[t, :], to_post[0:STREAMS])
                    T.copy(comb[t, :], to_comb)
                if mix:
                    T.copy(pre[t, :], to_pre[0:STREAMS])
                with T.SimdVF():
                    first = S.pset(32, "PAT_VL1")
                    total = S.alloc_var(T.float32)
                    total = S.vdup(0.0, T.float32)
                    for c in T.serial(T.uint16(d // 64)):
                        x0 = S.alloc_var(T.float32)
                        x0 = S.vld(x[0, c * 64])
                        x1 = S.alloc_var(T.float32)
                        x1 = S.vld(x[1, c * 64])
                        x2 = S.alloc_var(T.float32)
                        x2 = S.vld(x[2, c * 64])
                        x3 = S.alloc_var(T.float32)
                        x3 = S.vld(x[3, c * 64])
                        if update:
                            fresh = S.alloc_local(STREAMS, T.float32)
                            for j in T.unroll(STREAMS, explicit=True):
                                sum0 = S.vmul(x0, S.vld(to_comb[j], dist="BRC_B32"))
                                sum1 = S.vadd(sum0, S.vmul(x1, S.vld(to_comb[4 + j], dist="BRC_B32")))
                                sum2 = S.vadd(sum1, S.vmul(x2, S.vld(to_comb[8 + j], dist="BRC_B32")))
                                sum3 = S.vadd(sum2, S.vmul(x3, S.vld(to_comb[12 + j], dist="BRC_B32")))
                                push = S.vmul(S.vld(given[c * 64]), S.vld(to_post[j], dist="BRC_B32"))
                                fresh[j] = S.vadd(push, sum3)
                                S.vsts(x[j, c * 64], fresh[j])
                            x0 = fresh[0]
                            x1 = fresh[1]
                            x2 = fresh[2]
                            x3 = fresh[3]
                        total = S.vadd(total, S.vadd(S.vadd(S.vmul(x0, x0), S.vmul(x1, x1)),
                                                     S.vadd(S.vmul(x2, x2), S.vmul(x3, x3))))  # fmt: skip
                        if mix:
                            part0 = S.vmul(x0, S.vld(to_pre[0], dist="BRC_B32"))
                            part1 = S.vadd(part0, S.vmul(x1, S.vld(to_pre[1], dist="BRC_B32")))
                            part2 = S.vadd(part1, S.vmul(x2, S.vld(to_pre[2], dist="BRC_B32")))
                            S.vsts(mixed[c * 64], S.vadd(part2, S.vmul(x3, S.vld(to_pre[3], dist="BRC_B32"))))
                    S.vsts(square[0], S.vcadd(total), first, dist="ONEPT_B32")
                    if norm:
                        S.mem_bar("VST_VLD")
                        powers = S.alloc_var(T.float32)
                        powers = S.vdup(0.0, T.float32)
                        for c in T.serial(T.uint16(d // 64)):
                            value = S.vld(mixed[c * 64])
                            powers = S.vadd(powers, S.vmul(value, value))
                        mean = S.vdiv(S.vdupv(S.vcadd(powers)), S.vdup(T.float32(d), T.float32), precision="exact")
                        root = S.vsqrt(S.vadds(mean, eps), precision="ftz_false")
                        factor = S.vdiv(S.vdup(1.0, T.float32), root, precision="exact")
                        for c in T.serial(T.uint16(d // 64)):
                            value = S.vmul(S.vld(mixed[c * 64]), factor)
                            S.vsts(mixed[c * 64], S.vmul(value, S.vld(w[c * 64])))
                if update:
                    T.copy(x, X[t, :, :])
                if mix:
                    T.copy(mixed, out[t, :])
                T.copy(square[0:1], squares[t : t + 1])

    return hc_rows
