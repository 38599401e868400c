"""Where top-p and top-k cut the ranking of a row, as a TileLang program for NVIDIA GPUs: a search by digits.

Eight readings of a row settle four bits each of the last kept logit, from counts and masses that every thread keeps of
its own tokens: no atomics, so a row repeats to the bit. Needs tilelang; the annotations of a program are evaluated, so
this file keeps them as they are (no string ones).
"""

from typing import Any

import tilelang.language as T

from dspark_kernels.tile.verify import pieces

BITS = 4  # of a logit's 32, settled by one reading
BINS = 1 << BITS
_AHEAD = 8  # loads of a thread before it uses the first
_LOG2E = 1.4426950408889634


def cut_program(N: int, V: int, threads: int = 256) -> Any:
    """The cut of N rows of V tokens: value float32 [N], last int32 [N], row_top and row_mass float32 [N].

    A token v is kept if its logit is above `value`, or equal to it with v <= `last`; a row without filters has -inf and
    V. row_mass is the sum of e^((x - row_top) * factor) over kept tokens.

    Arguments in order: logits float32 [N, V], factor float32 [N] (1 / temperature; 1 for a greedy row), top_p float32
    [N] (1 for none), top_k int32 [N] (0 for none; 1 for a greedy row), top and warm float32 [N, pieces] of
    `stats_program`, then the four results.
    """
    if threads < BINS:
        raise ValueError(f"threads: got {threads}, allowed are {BINS} and more")
    P = pieces(V)
    stride = threads * _AHEAD
    part = -(-V // threads)  # tokens of a thread where ids count

    @T.prim_func
    def cut(
        logits: T.Tensor[(N, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        top_p: T.Tensor[(N,), T.float32],
        top_k: T.Tensor[(N,), T.int32],
        top: T.Tensor[(N, P), T.float32],
        warm: T.Tensor[(N, P), T.float32],
        value: T.Tensor[(N,), T.float32],
        last: T.Tensor[(N,), T.int32],
        row_top: T.Tensor[(N,), T.float32],
        row_mass: T.Tensor[(N,), T.float32],
    ):
        with T.Kernel(N, threads=threads) as n:
            tx = T.get_thread_binding()
            # one number more than a row of threads, so that a column of bins meets different banks
            counts = T.alloc_shared((BINS, threads + 1), "int32")
            masses = T.alloc_shared((BINS, threads + 1), "float32")
            bin_count = T.alloc_shared((BINS,), "int32")
            bin_mass = T.alloc_shared((BINS,), "float32")
            equal_of = T.alloc_shared((threads,), "int32")
            x = T.alloc_local((_AHEAD,), "float32")
            most = T.alloc_var("float32")
            mass = T.alloc_var("float32")
            most = -T.infinity("float32")
            mass = 0.0
            for p in T.serial(P):
                most = T.max(most, top[n, p])
            for p in T.serial(P):
                mass = mass + warm[n, p] * T.exp2((top[n, p] - most) * factor[n] * _LOG2E)
            limit = T.alloc_var("int32")
            share = T.alloc_var("float32")
            limit = T.if_then_else(top_k[n] > 0, top_k[n], V)
            share = T.if_then_else(top_p[n] < 1.0, top_p[n] * mass, T.infinity("float32"))
            if T.Or(limit < V, top_p[n] < 1.0):
                prefix = T.alloc_var("uint32")
                above = T.alloc_var("int32")
                above_mass = T.alloc_var("float32")
                digit = T.alloc_var("int32")
                found = T.alloc_var("int32")
                prefix = T.uint32(0)
                above = 0
                above_mass = 0.0
                digit = 0
                for step in T.serial(32 // BITS):
                    shift = T.cast(32 - BITS * (step + 1), "uint32")
                    for b in T.serial(BINS):
                        counts[b, tx] = 0
                        masses[b, tx] = 0.0
                    for i in T.serial(T.ceildiv(V, stride)):
                        for a in T.unroll(_AHEAD):
                            x[a] = logits[n, T.min(i * stride + a * threads + tx, V - 1)]
                        for a in T.unroll(_AHEAD):
                            bits = T.reinterpret(x[a], "uint32")
                            # unsigned order of logits; the two zeros are one
                            key = T.if_then_else(
                                x[a] == 0.0,
                                T.uint32(0x80000000),
                                T.if_then_else(x[a] < 0.0, ~bits, bits | T.uint32(0x80000000)),
                            )
                            inside = T.Or(step == 0, ((key ^ prefix) >> shift) < T.uint32(BINS))
                            if T.And(i * stride + a * threads + tx < V, inside):
                                d = T.cast((key >> shift) & T.uint32(BINS - 1), "int32")
                                counts[d, tx] = counts[d, tx] + 1
                                masses[d, tx] = masses[d, tx] + T.exp2((x[a] - most) * factor[n] * _LOG2E)
                    T.sync_threads()
                    if tx < BINS:
                        count = T.alloc_var("int32")
                        total = T.alloc_var("float32")
                        count = 0
                        total = 0.0
                        for t in T.serial(threads):
                            count = count + counts[tx, t]
                            total = total + masses[tx, t]
                        bin_count[tx] = count
                        bin_mass[tx] = total
                    T.sync_threads()
                    # down the bins, to the first behind which nothing is kept, or the lowest with tokens
                    found = 0
                    digit = -1
                    for b in T.serial(BINS):
                        if T.And(found == 0, bin_count[BINS - 1 - b] > 0):
                            if digit >= 0:
                                above = above + bin_count[digit]
                                above_mass = above_mass + bin_mass[digit]
                            digit = BINS - 1 - b
                            if T.Or(above + bin_count[digit] >= limit, above_mass + bin_mass[digit] >= share):
                                found = 1
                    digit = T.max(digit, 0)
                    prefix = prefix | (T.cast(digit, "uint32") << shift)
                edge = T.alloc_var("float32")
                edge = T.reinterpret(
                    T.if_then_else(prefix >= T.uint32(0x80000000), prefix ^ T.uint32(0x80000000), ~prefix), "float32"
                )
                # of `equal` tokens at the edge, the first `keep` by id
                weight = T.alloc_var("float32")
                equal = T.alloc_var("int32")
                keep = T.alloc_var("int32")
                weight = T.exp2((edge - most) * factor[n] * _LOG2E)
                equal = bin_count[digit]
                keep = T.min(equal, limit - above)
                if T.And(share < T.infinity("float32"), weight > 0.0):
                    keep = T.min(keep, T.cast(T.min(T.ceil((share - above_mass) / weight), 1.0 * equal), "int32"))
                keep = T.max(keep, 1)
                if keep < equal:
                    mine = T.alloc_var("int32")
                    before = T.alloc_var("int32")
                    mine = 0
                    for i in T.serial(part):
                        if T.And(tx * part + i < V, logits[n, T.min(tx * part + i, V - 1)] == edge):
                            mine = mine + 1
                    equal_of[tx] = mine
                    T.sync_threads()
                    before = 0
                    for t in T.serial(threads):
                        if t < tx:
                            before = before + equal_of[t]
                    if T.And(before < keep, before + mine >= keep):
                        for i in T.serial(part):
                            if T.And(tx * part + i < V, logits[n, T.min(tx * part + i, V - 1)] == edge):
                                before = before + 1
                                if before == keep:
                                    last[n] = tx * part + i
                elif tx == 0:
                    last[n] = V
                if tx == 0:
                    value[n] = edge
                    row_top[n] = most
                    row_mass[n] = above_mass + weight * keep
            elif tx == 0:
                value[n] = -T.infinity("float32")
                last[n] = V
                row_top[n] = most
                row_mass[n] = mass

    return cut
