"""Verification and draws for an Ascend 950, a request at a time on each vector core, from the cuts of `cut_asc`.

The steps of `tile.filtered`, with SIMT regions where those have barriers. Needs tilelang. It was lowered to AscendC and
never ran on a device.
"""

from typing import Any

import tilelang.ascend.language as T

from dspark_kernels.results import MOST_DRAFTS
from dspark_kernels.tile.cut_asc import CORES

PIECE = 4096  # tokens whose sums are searched together
_LOG2E = 1.4426950408889634


def _chance(x: Any, v: Any, value: Any, last: Any, top: Any, factor: Any) -> Any:
    """e^((x - top) * factor) of token v with logit x, 0 where it is cut away."""
    return T.if_then_else(T.Or(x > value, T.And(x == value, v <= last)), T.exp2((x - top) * factor * _LOG2E), 0.0)


def verify_program(R: int, G: int, N: int, V: int, S: int, threads: int = 128) -> Any:
    """Accepted drafts and the token behind them of R requests: results int32 [R, 8], of which two count.

    The token is -1 for a padding request. A draft alone is drawn by the same program: a row for a request, and draw 1
    as its u. Arguments in order: logits float32 [N, V], draft_logits float32 [S, G, V], factor float32 [N], the four
    results of `cut_program` [N, 8]; drafts int32 [S, G], log_q, top, factor, mass, value float32 and last int32 [S, G]
    of the records, mass NaN for a draft without a distribution; cu_rows int32 [R + 1], slots int32 [R], u float32
    [N, 3] (draws 2, 0 and 3 at the decided positions), results.
    """
    if not (R >= 1 and 1 <= G <= MOST_DRAFTS):
        raise ValueError(f"R, G: got {R}, {G}, allowed are requests with 1 to {MOST_DRAFTS} drafts")
    P = -(-V // PIECE)
    part = PIECE // threads

    @T.prim_func
    def verify(
        logits: T.Tensor[(N, V), T.float32],
        draft_logits: T.Tensor[(S, G, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        value: T.Tensor[(N, 8), T.float32],
        last: T.Tensor[(N, 8), T.int32],
        row_top: T.Tensor[(N, 8), T.float32],
        row_mass: T.Tensor[(N, 8), T.float32],
        drafts: T.Tensor[(S, G), T.int32],
        log_q: T.Tensor[(S, G), T.float32],
        draft_top: T.Tensor[(S, G), T.float32],
        draft_factor: T.Tensor[(S, G), T.float32],
        draft_mass: T.Tensor[(S, G), T.float32],
        draft_value: T.Tensor[(S, G), T.float32],
        draft_last: T.Tensor[(S, G), T.int32],
        cu_rows: T.Tensor[(R + 1,), T.int32],
        slots: T.Tensor[(R,), T.int32],
        u: T.Tensor[(N, 3), T.float32],
        results: T.Tensor[(R, 8), T.int32],
    ):
        with T.Kernel(CORES) as core:
            sums = T.alloc_shared((P, threads), T.float32)
            piece = T.alloc_shared((P,), T.float32)
            runs = T.alloc_shared((threads,), T.float32)
            # row, place, slot, whether the drafter's law is taken off, the chosen piece
            whole = T.alloc_shared((8,), T.int32)
            # the draw, the sum before the chosen piece, all of the sum
            real = T.alloc_shared((8,), T.float32)
            out = T.alloc_shared((8,), T.int32)
            for turn in T.serial(T.ceildiv(R, CORES)):
                r = turn * CORES + core
                if r < R:
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        if tx == 0:
                            at = T.max(T.min(slots[r], S - 1), 0)
                            stands = T.alloc_var(T.int32, init=0)
                            open_ = T.alloc_var(T.int32, init=1)
                            for j in T.serial(G):
                                if T.And(open_ == 1, cu_rows[r] + j + 1 < cu_rows[r + 1]):
                                    row = T.max(T.min(cu_rows[r] + j, N - 1), 0)
                                    token = T.max(T.min(drafts[at, j], V - 1), 0)
                                    x = T.alloc_var(T.float32, init=logits[row, token])
                                    p = T.alloc_var(T.float32, init=0.0)
                                    p = _chance(x, token, value[row, 0], last[row, 0], row_top[row, 0], factor[row])
                                    p = p / row_mass[row, 0] * T.exp2(-log_q[at, j] * _LOG2E)
                                    open_ = 0
                                    if T.And(drafts[at, j] == token, u[row, 0] < p):
                                        open_ = 1
                                        stands = stands + 1
                            end = T.max(T.min(cu_rows[r] + stands, N - 1), 0)
                            j = T.min(stands, G - 1)
                            rejected = T.alloc_var(T.int32, init=0)
                            rejected = T.if_then_else(cu_rows[r] + stands + 1 < cu_rows[r + 1], 1, 0)
                            out[0] = stands
                            whole[0] = end
                            whole[1] = j
                            whole[2] = at
                            whole[3] = T.if_then_else(T.And(rejected == 1, draft_mass[at, j] > 0.0), 1, 0)
                            real[0] = T.if_then_else(rejected == 1, u[end, 2], u[end, 1])
                            real[2] = 0.0
                    for attempt in T.serial(2):
                        # a second time only if nothing is left of p - q
                        with T.SimtVF(threads=threads):
                            tx = T.get_thread_binding(0)
                            if real[2] <= 0.0:
                                n = T.max(T.min(whole[0], N - 1), 0)
                                j = T.max(T.min(whole[1], G - 1), 0)
                                at = T.max(T.min(whole[2], S - 1), 0)
                                for k in T.serial(P):
                                    mine = T.alloc_var(T.float32, init=0.0)
                                    for i in T.serial(part):
                                        v = k * PIECE + i * threads + tx
                                        if v < V:
                                            x = T.alloc_var(T.float32, init=logits[n, v])
                                            w = T.alloc_var(T.float32, init=0.0)
                                            w = _chance(x, v, value[n, 0], last[n, 0], row_top[n, 0], factor[n])
                                            w = w / row_mass[n, 0]
                                            if T.And(whole[3] == 1, attempt == 0):
                                                y = T.alloc_var(T.float32, init=draft_logits[at, j, v])
                                                q = T.alloc_var(T.float32, init=0.0)
                                                q = _chance(y, v, draft_value[at, j], draft_last[at, j],
                                                            draft_top[at, j], draft_factor[at, j])  # fmt: skip
                                                w = w - q / draft_mass[at, j]
                                            mine = mine + T.max(w, 0.0)
                                    sums[k, tx] = mine
                        with T.SimtVF(threads=threads):
                            tx = T.get_thread_binding(0)
                            for g in T.serial(T.ceildiv(P, threads)):
                                if g * threads + tx < P:
                                    mine = T.alloc_var(T.float32, init=0.0)
                                    for t in T.serial(threads):
                                        mine = mine + sums[g * threads + tx, t]
                                    piece[g * threads + tx] = mine
                        with T.SimtVF(threads=threads):
                            tx = T.get_thread_binding(0)
                            if T.And(tx == 0, real[2] <= 0.0):
                                total = T.alloc_var(T.float32, init=0.0)
                                for k in T.serial(P):
                                    total = total + piece[k]
                                if attempt == 1:
                                    whole[3] = 0
                                before = T.alloc_var(T.float32, init=0.0)
                                mine = T.alloc_var(T.float32, init=0.0)
                                found = T.alloc_var(T.int32, init=0)
                                chosen = T.alloc_var(T.int32, init=0)
                                for k in T.serial(P):
                                    if T.And(found == 0, piece[k] > 0.0):
                                        before = before + mine
                                        mine = piece[k]
                                        chosen = k
                                        if before + mine >= real[0] * total:
                                            found = 1
                                whole[4] = chosen
                                real[1] = before
                                real[2] = total
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        n = T.max(T.min(whole[0], N - 1), 0)
                        j = T.max(T.min(whole[1], G - 1), 0)
                        at = T.max(T.min(whole[2], S - 1), 0)
                        mine = T.alloc_var(T.float32, init=0.0)
                        for i in T.serial(part):
                            v = T.max(whole[4], 0) * PIECE + tx * part + i
                            if v < V:
                                x = T.alloc_var(T.float32, init=logits[n, v])
                                w = T.alloc_var(T.float32, init=0.0)
                                w = _chance(x, v, value[n, 0], last[n, 0], row_top[n, 0], factor[n]) / row_mass[n, 0]
                                if whole[3] == 1:
                                    y = T.alloc_var(T.float32, init=draft_logits[at, j, v])
                                    q = T.alloc_var(T.float32, init=0.0)
                                    q = _chance(y, v, draft_value[at, j], draft_last[at, j], draft_top[at, j],
                                                draft_factor[at, j])  # fmt: skip
                                    w = w - q / draft_mass[at, j]
                                mine = mine + T.max(w, 0.0)
                        runs[tx] = mine
                    with T.SimtVF(threads=threads):
                        tx = T.get_thread_binding(0)
                        if tx == 0:
                            n = T.max(T.min(whole[0], N - 1), 0)
                            j = T.max(T.min(whole[1], G - 1), 0)
                            at = T.max(T.min(whole[2], S - 1), 0)
                            goal = T.alloc_var(T.float32, init=real[0] * real[2])
                            before = T.alloc_var(T.float32, init=real[1])
                            mine = T.alloc_var(T.float32, init=0.0)
                            found = T.alloc_var(T.int32, init=0)
                            run = T.alloc_var(T.int32, init=0)
                            for t in T.serial(threads):
                                if T.And(found == 0, runs[t] > 0.0):
                                    before = before + mine
                                    mine = runs[t]
                                    run = t
                                    if before + mine >= goal:
                                        found = 1
                            chosen = T.alloc_var(T.int32, init=0)
                            found = 0
                            for i in T.serial(part):
                                v = T.max(whole[4], 0) * PIECE + T.max(run, 0) * part + i
                                if T.And(found == 0, v < V):
                                    x = T.alloc_var(T.float32, init=logits[n, T.min(v, V - 1)])
                                    w = T.alloc_var(T.float32, init=0.0)
                                    w = _chance(x, v, value[n, 0], last[n, 0], row_top[n, 0], factor[n])
                                    w = w / row_mass[n, 0]
                                    if whole[3] == 1:
                                        y = T.alloc_var(T.float32, init=draft_logits[at, j, T.min(v, V - 1)])
                                        q = T.alloc_var(T.float32, init=0.0)
                                        q = _chance(y, v, draft_value[at, j], draft_last[at, j], draft_top[at, j],
                                                    draft_factor[at, j])  # fmt: skip
                                        w = w - q / draft_mass[at, j]
                                    if w > 0.0:
                                        chosen = v
                                        before = before + w
                                        if before >= goal:
                                            found = 1
                            out[1] = T.if_then_else(cu_rows[r + 1] > cu_rows[r], chosen, -1)
                    T.copy(out, results[r, 0:8])

    return verify
