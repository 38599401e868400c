"""Distributions of rows for an Ascend 950: largest logit, filters and mass, a row at a time on each vector core.

The search by digits of `cut_program`, with SIMT regions where that has barriers. Needs tilelang. It was lowered to
AscendC and never ran on a device.
"""

from typing import Any

import tilelang.ascend.language as T

from dspark_kernels.tile.cut import BINS, BITS

CORES = 64  # vector cores
_LOG2E = 1.4426950408889634


def _key(x: Any) -> Any:
    """Unsigned order of a logit; the two zeros are one."""
    bits = T.reinterpret(x, "uint32")
    high = T.uint32(0x80000000)
    return T.if_then_else(x == 0.0, high, T.if_then_else(x < 0.0, ~bits, bits | high))


def cut_program(N: int, V: int, threads: int = 128) -> Any:
    """value float32, last int32, row_top and row_mass float32 of N rows, as `tile.cut.cut_program` has them.

    Arguments in order: logits float32 [N, V], factor float32, top_p float32, top_k int32 [N] as there, then the
    results, whose rows are eight numbers apart (copies have 32 bytes): [N, 8], of which the first counts.
    """
    if N < 1 or V < 1:
        raise ValueError(f"N, V: got {N}, {V}, allowed are positive sizes")
    if threads < BINS:
        raise ValueError(f"threads: got {threads}, allowed are {BINS} and more")
    part = -(-V // threads)

    @T.prim_func
    def cut(
        logits: T.Tensor[(N, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        top_p: T.Tensor[(N,), T.float32],
        top_k: T.Tensor[(N,), T.int32],
        value: T.Tensor[(N, 8), T.float32],
        last: T.Tensor[(N, 8), T.int32],
        row_top: T.Tensor[(N, 8), T.float32],
        row_mass: T.Tensor[(N, 8), T.float32],
    ):
        with T.Kernel(CORES) as core:
            counts = T.alloc_shared((BINS, threads), T.int32)
            masses = T.alloc_shared((BINS, threads), T.float32)
            mine = T.alloc_shared((threads,), T.float32)
            bin_count = T.alloc_shared((BINS,), T.int32)
            bin_mass = T.alloc_shared((BINS,), T.float32)
            prefix = T.alloc_shared((8,), T.uint32)
            # digit, tokens above it, tokens of it that are kept
            whole = T.alloc_shared((8,), T.int32)
            # largest logit, share that is kept, mass above the digit
            real = T.alloc_shared((8,), T.float32)
            value_ub = T.alloc_shared((8,), T.float32)
            last_ub = T.alloc_shared((8,), T.int32)
            top_ub = T.alloc_shared((8,), T.float32)
            mass_ub = T.alloc_shared((8,), T.float32)
            for turn in T.serial(T.ceildiv(N, CORES)):
                n = turn * CORES + core
                if n < N:
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        most = T.alloc_var(T.float32, init=-T.infinity(T.float32))
                        for i in T.serial(part):
                            if i * threads + tx < V:
                                most = T.max(most, logits[n, i * threads + tx])
                        mine[tx] = most
                        if tx == 0:
                            prefix[0] = T.uint32(0)
                            whole[1] = 0
                            real[2] = 0.0
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        if tx == 0:
                            most = T.alloc_var(T.float32, init=-T.infinity(T.float32))
                            for t in T.serial(threads):
                                most = T.max(most, mine[t])
                            real[0] = most
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        total = T.alloc_var(T.float32, init=0.0)
                        for i in T.serial(part):
                            if i * threads + tx < V:
                                total = total + T.exp2((logits[n, i * threads + tx] - real[0]) * factor[n] * _LOG2E)
                        mine[tx] = total
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        if tx == 0:
                            total = T.alloc_var(T.float32, init=0.0)
                            for t in T.serial(threads):
                                total = total + mine[t]
                            real[1] = T.if_then_else(top_p[n] < 1.0, top_p[n] * total, T.infinity(T.float32))
                            value_ub[0] = -T.infinity(T.float32)
                            last_ub[0] = V
                            top_ub[0] = real[0]
                            mass_ub[0] = total
                            whole[3] = T.if_then_else(top_k[n] > 0, T.min(top_k[n], V), V)
                            whole[2] = T.if_then_else(T.Or(whole[3] < V, top_p[n] < 1.0), 1, 0)
                    for step in T.serial(32 // BITS):
                        with T.SimtVF(threads=threads):
                            tx = T.get_thread_binding(0)
                            shift = T.cast(32 - BITS * (step + 1), "uint32")
                            for b in T.serial(BINS):
                                counts[b, tx] = 0
                                masses[b, tx] = 0.0
                            if whole[2] == 1:
                                for i in T.serial(part):
                                    if i * threads + tx < V:
                                        x = T.alloc_var(T.float32, init=logits[n, i * threads + tx])
                                        key = T.alloc_var(T.uint32, init=_key(x))
                                        if T.Or(step == 0, ((key ^ prefix[0]) >> shift) < T.uint32(BINS)):
                                            d = T.alloc_var(T.int32, init=0)
                                            d = T.cast((key >> shift) & T.uint32(BINS - 1), T.int32)
                                            counts[d, tx] = counts[d, tx] + 1
                                            masses[d, tx] = masses[d, tx] + T.exp2((x - real[0]) * factor[n] * _LOG2E)
                        with T.SimtVF(threads=threads):
                            tx = T.get_thread_binding(0)
                            if tx < BINS:
                                count = T.alloc_var(T.int32, init=0)
                                total = T.alloc_var(T.float32, init=0.0)
                                for t in T.serial(threads):
                                    count = count + counts[tx, t]
                                    total = total + masses[tx, t]
                                bin_count[tx] = count
                                bin_mass[tx] = total
                        with T.SimtVF(threads=threads):
                            tx = T.get_thread_binding(0)
                            if tx == 0:
                                shift = T.cast(32 - BITS * (step + 1), "uint32")
                                found = T.alloc_var(T.int32, init=0)
                                digit = T.alloc_var(T.int32, init=-1)
                                above = T.alloc_var(T.int32, init=whole[1])
                                above_mass = T.alloc_var(T.float32, init=real[2])
                                for b in T.serial(BINS):
                                    if T.And(found == 0, bin_count[BINS - 1 - b] > 0):
                                        if digit >= 0:
                                            above = above + bin_count[digit]
                                            above_mass = above_mass + bin_mass[digit]
                                        digit = BINS - 1 - b
                                        if T.Or(
                                            above + bin_count[digit] >= whole[3],
                                            above_mass + bin_mass[digit] >= real[1],
                                        ):
                                            found = 1
                                digit = T.max(digit, 0)
                                prefix[0] = prefix[0] | (T.cast(digit, T.uint32) << shift)
                                whole[0] = digit
                                whole[1] = above
                                real[2] = above_mass
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        if T.And(tx == 0, whole[2] == 1):
                            high = T.uint32(0x80000000)
                            bits = T.alloc_var(T.uint32, init=prefix[0])
                            bits = T.if_then_else(bits >= high, bits ^ high, ~bits)
                            edge = T.alloc_var(T.float32, init=T.reinterpret(bits, T.float32))
                            weight = T.alloc_var(T.float32, init=T.exp2((edge - real[0]) * factor[n] * _LOG2E))
                            equal = T.alloc_var(T.int32, init=bin_count[whole[0]])
                            keep = T.alloc_var(T.int32, init=0)
                            keep = T.min(equal, whole[3] - whole[1])
                            if T.And(real[1] < T.infinity(T.float32), weight > 0.0):
                                most_kept = T.min((real[1] - real[2]) / weight, 1.0 * equal)
                                keep = T.min(keep, T.cast(T.ceil(most_kept), T.int32))
                            keep = T.max(keep, 1)
                            value_ub[0] = edge
                            mass_ub[0] = real[2] + weight * keep
                            if keep < equal:
                                seen = T.alloc_var(T.int32, init=0)
                                for i in T.serial(V):
                                    if logits[n, i] == edge:
                                        seen = seen + 1
                                        if seen == keep:
                                            last_ub[0] = i
                    T.copy(value_ub, value[n, 0:8])
                    T.copy(last_ub, last[n, 0:8])
                    T.copy(top_ub, row_top[n, 0:8])
                    T.copy(mass_ub, row_mass[n, 0:8])

    return cut
