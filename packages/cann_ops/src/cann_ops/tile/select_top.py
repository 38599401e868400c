"""The k best of a row of scores, in ascending order of their places: a search by digits on vector lanes.

Scores become uint32 keys that order as they do. 16 passes of two bits find the k-th largest key: each counts the keys
at or above three bounds. What is above it is taken, and of what equals it the first, until k are. Counts are integers,
so nothing depends on the number of cores or on what else is in the batch.
"""

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S

from cann_ops.tile.cores import VECTOR_CORES

CHUNK = 8192  # scores in the unified buffer at a time, of which two lie there
_LOWEST = 0x007FFFFF  # the key of -inf


@T.macro
def order_key(x):
    """uint32 that orders as x does; both zeros are one; NaN is -inf."""
    word = T.reinterpret(S.vadds(x, 0.0), "int32x64")
    sign = T.reinterpret(S.vshrs(word, 31), "uint32x64")
    flip = S.vor(sign, S.vdup(T.uint32(0x80000000), "uint32"))
    key = S.vxor(T.reinterpret(word, "uint32x64"), flip)
    lost = S.vcmp(x, x, op="ne")
    return S.vsel(S.vdup(T.uint32(_LOWEST), "uint32"), key, lost)


@T.macro
def counted(mask):
    """1 in the lanes of a mask, int32."""
    return S.vsel(S.vdup(T.int32(1), T.int32), S.vdup(T.int32(0), T.int32), mask)


def program(k: int) -> Any:
    """scores float32 [n, width], visible int32 [n]: of row t the first visible[t] count; indices int32 [n, k],
    ascending, -1 behind them where fewer are visible. A NaN ranks as -inf, ties go to the lower place."""
    if not 1 <= k <= 4096:
        raise ValueError(f"k: got {k}, allowed is 1 to 4096")
    room = -(-k // 64) * 64
    n, width = T.dynamic("n"), T.dynamic("width")

    @T.prim_func
    def select_top(
        scores: T.Tensor[(n, width), T.float32],
        visible: T.Tensor[(n,), T.int32],
        indices: T.Tensor[(n, k), T.int32],
    ):
        with T.Kernel(VECTOR_CORES) as core:
            score = T.alloc_shared((CHUNK,), T.float32)
            bound = T.alloc_shared((64,), T.uint32)
            hits = T.alloc_shared((3, 64), T.int32)
            out = T.alloc_shared((room,), T.int32)
            T.annotate_buffer_versions({bound: 1, hits: 1, out: 1})
            for task in T.serial(T.ceildiv(n - core, VECTOR_CORES)):
                t = T.alloc_var(T.int32, init=task * VECTOR_CORES + core)
                count = T.alloc_var(T.int32, init=T.min(visible[t], width))
                with T.SimdVF():
                    S.vsts(bound[0], S.vdup(T.uint32(0), "uint32"))
                    for c in T.serial(T.uint16(room // 64)):
                        S.vsts(out[c * 64], S.vdup(T.int32(-1), T.int32))
                for digit in T.serial(17):  # the last counts what is above the bound
                    with T.SimdVF():
                        for j in T.serial(T.uint16(3)):
                            S.vsts(hits[j, 0], S.vdup(T.int32(0), T.int32))
                    shift = T.cast(30 - 2 * T.min(digit, 15), T.uint32)  # 0 for the last digit and for the count
                    step = T.alloc_var(T.uint32, init=T.uint32(1) << shift)
                    for chunk in T.serial(T.ceildiv(count, CHUNK)):
                        T.copy(scores[t, chunk * CHUNK : chunk * CHUNK + CHUNK], score)
                        here = T.alloc_var(T.int32, init=T.min(CHUNK, count - chunk * CHUNK))
                        with T.SimdVF():
                            lane = S.vci(0, T.int32)
                            first = S.vadds(S.vld(bound[0]), step)
                            second = S.vadds(first, step)
                            third = S.vadds(second, step)
                            one = S.alloc_var(T.int32)
                            one = S.vld(hits[0, 0])
                            two = S.alloc_var(T.int32)
                            two = S.vld(hits[1, 0])
                            three = S.alloc_var(T.int32)
                            three = S.vld(hits[2, 0])
                            for v in T.serial(T.uint16(T.ceildiv(here, 64))):
                                there = S.vcmps(S.vadds(lane, T.int32(v) * 64), here, op="lt")
                                key = order_key(S.vld(score[v * 64]))
                                one = S.vadd(one, counted(S.vcmp(key, first, there, op="ge")))
                                two = S.vadd(two, counted(S.vcmp(key, second, there, op="ge")))
                                three = S.vadd(three, counted(S.vcmp(key, third, there, op="ge")))
                            S.vsts(hits[0, 0], one)
                            S.vsts(hits[1, 0], two)
                            S.vsts(hits[2, 0], three)
                    if digit < 16:
                        with T.SimdVF():
                            found = S.alloc_var(T.uint32)
                            found = S.vld(bound[0])
                            tried = S.alloc_var(T.uint32)
                            tried = S.vld(bound[0])
                            for j in T.serial(T.uint16(3)):
                                tried = S.vadds(tried, step)
                                enough = S.vcmps(S.vdupv(S.vcadd(S.vld(hits[j, 0]))), T.int32(k), op="ge")
                                found = S.vsel(tried, found, enough)
                            S.vsts(bound[0], found)
                with T.SimdVF():  # from here on: places still to fill by equal keys, what is taken, equal keys so far
                    above = S.vdupv(S.vcadd(S.vld(hits[0, 0])))
                    S.vsts(hits[0, 0], S.vsub(S.vdup(T.int32(k), T.int32), above))
                    S.vsts(hits[1, 0], S.vdup(T.int32(0), T.int32))
                    S.vsts(hits[2, 0], S.vdup(T.int32(0), T.int32))
                for chunk in T.serial(T.ceildiv(count, CHUNK)):
                    T.copy(scores[t, chunk * CHUNK : chunk * CHUNK + CHUNK], score)
                    here = T.alloc_var(T.int32, init=T.min(CHUNK, count - chunk * CHUNK))
                    with T.SimdVF():
                        every = S.pset(32)
                        lane = S.vci(0, T.int32)
                        least = S.vld(bound[0])
                        open_ = S.vld(hits[0, 0])
                        taken = S.alloc_var(T.int32)
                        taken = S.vld(hits[1, 0])
                        equals = S.alloc_var(T.int32)
                        equals = S.vld(hits[2, 0])
                        for v in T.serial(T.uint16(T.ceildiv(here, 64))):
                            place = S.vadds(lane, T.int32(v) * 64)
                            there = S.vcmps(place, here, op="lt")
                            key = order_key(S.vld(score[v * 64]))
                            above = S.vcmp(key, least, there, op="gt")
                            equal = S.vcmp(key, least, there, op="eq")
                            early = S.vcmp(S.vadd(S.vusqz(equal), equals), open_, equal, op="lt")
                            chosen = S.por(above, early, every)
                            target = T.reinterpret(S.vadd(S.vusqz(chosen), taken), "uint32x64")
                            S.vscatter(S.vadds(place, chunk * CHUNK), out[0], target, chosen)
                            taken = S.vadd(taken, S.vdupv(S.vcadd(counted(chosen))))
                            equals = S.vadd(equals, S.vdupv(S.vcadd(counted(equal))))
                        S.vsts(hits[1, 0], taken)
                        S.vsts(hits[2, 0], equals)
                T.copy(out[:k], indices[t, :])

    return select_top
