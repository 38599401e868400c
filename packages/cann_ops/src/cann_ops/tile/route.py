"""Router: sqrt(softplus) scores, the top k of score + bias, and their weights, a row at a time on vector lanes.

Biased scores are compared as integers that order as the numbers do, so that what is taken already can stand below -inf,
and a NaN beside it. The lowest expert wins a tie: of the lanes that hold the largest key, the smallest index.
"""

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S

from cann_ops.tile.cores import VECTOR_CORES

ROWS = 16  # of a tile
MOST_EXPERTS = 1024
_TAKEN = -(2**31)
_LOWEST = -2139095041  # the key of -inf


@T.macro
def log1p_ratio(z):
    """log(1 + z) / z for z in [0, 1]: the rounding error of 1 + z is divided out again (Kahan); 1 where 1 + z is 1."""
    one = S.vdup(1.0, T.float32)
    raised = S.vadd(z, one)
    small = S.vcmp(raised, one, op="eq")
    safe = S.vsel(S.vdup(2.0, T.float32), raised, small)
    ratio = S.vdiv(S.vln(safe, precision="ftz_false"), S.vsub(safe, one), precision="exact")
    return S.vsel(one, ratio, small)


@T.macro
def sqrt_softplus(x):
    """sqrt(log(1 + e^x)); below 0 as e^(x/2) sqrt(log1p(z) / z), z = e^x, which does not underflow early."""
    size = S.vabs(x)
    z = S.vexp(S.vmuls(size, -1.0), precision="ftz_false")
    ratio = log1p_ratio(z)
    low = S.vmul(S.vexp(S.vmuls(x, 0.5), precision="ftz_false"), S.vsqrt(ratio, precision="ftz_false"))
    high = S.vsqrt(S.vadd(size, S.vmul(ratio, z)), precision="ftz_false")
    negative = S.vcmps(x, 0.0, op="lt")
    value = S.vsel(low, high, negative)
    lost = S.vcmp(x, x, op="ne")
    return S.vsel(x, value, lost)


@T.macro
def order_key(x):
    """int32 that orders as x does; both zeros are one; NaN is -inf."""
    word = T.reinterpret(S.vadds(x, 0.0), "int32x64")
    flip = S.vand(S.vshrs(word, 31), S.vdup(T.int32(0x7FFFFFFF), T.int32))
    key = S.vxor(word, flip)
    lost = S.vcmp(x, x, op="ne")
    return S.vsel(S.vdup(T.int32(_LOWEST), T.int32), key, lost)


def program(experts: int, top_k: int, image: bool) -> Any:
    """logits float32 [n, E], bias float32 [2, E] (text, image), is_image int32 [n], routed_scale float32; ids int32
    [n, k], weights float32 [n, k]."""
    if not (1 <= top_k <= min(experts, 32) and experts <= MOST_EXPERTS):
        raise ValueError(f"experts, top_k: got {experts}, {top_k}, allowed are up to {MOST_EXPERTS} and 32")
    width = -(-experts // 64) * 64
    slots = -(-top_k // 8) * 8
    n = T.dynamic("n")

    @T.prim_func
    def route(
        logits: T.Tensor[(n, experts), T.float32],
        bias: T.Tensor[(2, experts), T.float32],
        is_image: T.Tensor[(n,), T.int32],
        ids: T.Tensor[(n, top_k), T.int32],
        weights: T.Tensor[(n, top_k), T.float32],
        routed_scale: T.float32,
    ):
        with T.Kernel(VECTOR_CORES) as core:
            score = T.alloc_shared((ROWS, width), T.float32)
            key = T.alloc_shared((ROWS, width), T.int32)
            added = T.alloc_shared((2, width), T.float32)
            flag = T.alloc_shared((ROWS,), T.int32)
            id_ub = T.alloc_shared((ROWS, slots), T.int32)
            weight_ub = T.alloc_shared((ROWS, slots), T.float32)
            T.copy(bias, added[:, :experts])
            for tile in T.Persistent([T.ceildiv(n, ROWS)], VECTOR_CORES, core, group_size=1, num_stages=2):
                T.copy(logits[tile * ROWS, 0], score[:, :experts])
                if image:
                    T.copy(is_image[tile * ROWS], flag)
                here = T.alloc_var(T.int32, init=T.min(ROWS, n - tile * ROWS))
                with T.SimdVF():
                    first = S.pset(32, "PAT_VL1")
                    lane = S.vci(0, T.int32)
                    for r in T.serial(T.uint16(here)):
                        for c in T.serial(T.uint16(width // 64)):
                            value = sqrt_softplus(S.vld(score[r, c * 64]))
                            S.vsts(score[r, c * 64], value)
                            push = S.alloc_var(T.float32)
                            push = S.vld(added[0, c * 64])
                            if image:
                                seen = S.vcmps(S.vld(flag[r], dist="BRC_B32"), T.int32(0), op="ne")
                                push = S.vsel(S.vld(added[1, c * 64]), push, seen)
                            real = S.vcmps(lane, T.int32(experts) - T.int32(c) * 64, op="lt")
                            chosen = S.vsel(order_key(S.vadd(value, push)), S.vdup(T.int32(_TAKEN), T.int32), real)
                            S.vsts(key[r, c * 64], chosen)
                    S.mem_bar("VST_VLD")
                    for r in T.serial(T.uint16(here)):
                        total = S.alloc_var(T.float32)
                        total = S.vdup(0.0, T.float32)
                        for k in T.unroll(top_k, explicit=True):
                            top = S.alloc_var(T.int32)
                            top = S.vld(key[r, 0])
                            for c in T.serial(T.uint16(1), T.uint16(width // 64)):
                                top = S.vmax(top, S.vld(key[r, c * 64]))
                            best = S.vdupv(S.vcmax(top))
                            found = S.alloc_var(T.int32)
                            found = S.vdup(T.int32(MOST_EXPERTS), T.int32)
                            for c in T.serial(T.uint16(width // 64)):
                                equal = S.vcmp(S.vld(key[r, c * 64]), best, op="eq")
                                index = S.vadds(lane, T.int32(c) * 64)
                                found = S.vmin(found, S.vsel(index, S.vdup(T.int32(MOST_EXPERTS), T.int32), equal))
                            winner = S.vdupv(S.vcmin(found))
                            S.vsts(id_ub[r, k], winner, first, dist="ONEPT_B32")
                            picked = S.alloc_var(T.float32)
                            picked = S.vdup(0.0, T.float32)
                            for c in T.serial(T.uint16(width // 64)):
                                is_it = S.vcmp(S.vadds(lane, T.int32(c) * 64), winner, op="eq")
                                kept = S.vsel(S.vdup(T.int32(_TAKEN), T.int32), S.vld(key[r, c * 64]), is_it)
                                S.vsts(key[r, c * 64], kept)
                                picked = S.vsel(S.vld(score[r, c * 64]), picked, is_it)
                            alone = S.vcmp(S.vand(lane, S.vdup(T.int32(63), T.int32)),
                                           S.vand(winner, S.vdup(T.int32(63), T.int32)), op="eq")  # fmt: skip
                            weight = S.vdupv(S.vcadd(S.vsel(picked, S.vdup(0.0, T.float32), alone)))
                            S.vsts(weight_ub[r, k], weight, first, dist="ONEPT_B32")
                            total = S.vadd(total, weight)
                            S.mem_bar("VST_VLD")
                        shares = S.vdiv(S.vld(weight_ub[r, 0]), S.vadds(total, 1e-20), precision="exact")
                        kept_slots = S.update_mask(T.uint32(slots), 32)
                        S.vsts(weight_ub[r, 0], S.vmuls(shares, routed_scale), kept_slots, dist="NORM_B32",
                               extent=slots)  # fmt: skip
                T.copy(id_ub[:, :top_k], ids[tile * ROWS, 0])
                T.copy(weight_ub[:, :top_k], weights[tile * ROWS, 0])

    return route
