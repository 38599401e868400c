"""Decisions and draws on rows with cuts as TileLang programs for NVIDIA GPUs (the cuts are those of `cut_program`).

A token v of a row is kept if its logit is above the row's `value`, or equal to it with v <= `last`. Needs tilelang; the
annotations of a program are evaluated, so this file keeps them as they are (no string ones).
"""

from typing import Any

import tilelang.language as T

from dspark_kernels.tile.verify import PIECE, pieces

_LOG2E = 1.4426950408889634


def _chance(x: Any, v: Any, value: Any, last: Any, top: Any, scale: Any) -> Any:
    """e^((x - top) * factor) of token v with logit x, 0 where it is cut away; scale is factor / ln 2."""
    return T.if_then_else(T.Or(x > value, T.And(x == value, v <= last)), T.exp2((x - top) * scale), 0.0)


def decide_program(R: int, G: int, N: int, V: int, S: int, threads: int = 64) -> Any:
    """Accepted drafts int32 [R] of R requests: one thread each.

    Arguments in order: logits float32 [N, V], factor, row_top, row_mass, value float32 [N], last int32 [N], cu_rows
    int32 [R + 1], slots int32 [R], drafts int64 [S, G] and log_q float32 [S, G] of the records, u float32 [N] (draw 2
    at the decided positions), accepted.
    """

    @T.prim_func
    def decide(
        logits: T.Tensor[(N, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        row_top: T.Tensor[(N,), T.float32],
        row_mass: T.Tensor[(N,), T.float32],
        value: T.Tensor[(N,), T.float32],
        last: T.Tensor[(N,), T.int32],
        cu_rows: T.Tensor[(R + 1,), T.int32],
        slots: T.Tensor[(R,), T.int32],
        drafts: T.Tensor[(S, G), T.int64],
        log_q: T.Tensor[(S, G), T.float32],
        u: T.Tensor[(N,), T.float32],
        accepted: T.Tensor[(R,), T.int32],
    ):
        with T.Kernel(T.ceildiv(R, threads), threads=threads) as block:
            r = block * threads + T.get_thread_binding()
            if r < R:
                stands = T.alloc_var("int32")
                open_ = T.alloc_var("int32")
                stands = 0
                open_ = 1
                at = T.max(T.min(slots[r], S - 1), 0)
                x = T.alloc_var("float32")
                p = T.alloc_var("float32")
                for j in T.serial(G):
                    if T.And(open_ == 1, cu_rows[r] + j + 1 < cu_rows[r + 1]):
                        row = T.max(T.min(cu_rows[r] + j, N - 1), 0)
                        token = T.cast(T.max(T.min(drafts[at, j], T.int64(V - 1)), T.int64(0)), "int32")
                        x = logits[row, token]
                        p = _chance(x, token, value[row], last[row], row_top[row], factor[row] * _LOG2E) / row_mass[row]
                        open_ = 0
                        if T.And(drafts[at, j] == token, u[row] < p * T.exp2(-log_q[at, j] * _LOG2E)):
                            open_ = 1
                            stands = stands + 1
                accepted[r] = stands

    return decide


def token_program(R: int, G: int, N: int, V: int, S: int, threads: int = 256) -> Any:
    """The token behind the accepted drafts: int64 [R], -1 for a padding request.

    From max(p - q, 0) with u[n, 1] (draw 3) behind a rejection, or from p where that is 0 everywhere or the draft had
    no distribution; from p with u[n, 0] (draw 0) otherwise. Arguments in order: logits, draft_logits float32
    [S, G, V], factor, row_top, row_mass, value, last of rows; top, factor, mass, value float32 and last int32 [S, G] of
    the records; cu_rows, slots, accepted, u float32 [N, 2], tokens. A draft without a distribution has mass NaN.
    """
    P = pieces(V)
    part = -(-PIECE // threads)

    @T.prim_func
    def token(
        logits: T.Tensor[(N, V), T.float32],
        draft_logits: T.Tensor[(S, G, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        row_top: T.Tensor[(N,), T.float32],
        row_mass: T.Tensor[(N,), T.float32],
        value: T.Tensor[(N,), T.float32],
        last: T.Tensor[(N,), T.int32],
        draft_top: T.Tensor[(S, G), T.float32],
        draft_factor: T.Tensor[(S, G), T.float32],
        draft_mass: T.Tensor[(S, G), T.float32],
        draft_value: T.Tensor[(S, G), T.float32],
        draft_last: T.Tensor[(S, G), T.int32],
        cu_rows: T.Tensor[(R + 1,), T.int32],
        slots: T.Tensor[(R,), T.int32],
        accepted: T.Tensor[(R,), T.int32],
        u: T.Tensor[(N, 2), T.float32],
        tokens: T.Tensor[(R,), T.int64],
    ):
        with T.Kernel(R, threads=threads) as r:
            tx = T.get_thread_binding()
            sums = T.alloc_shared((P, threads + 1), "float32")
            piece = T.alloc_shared((P,), "float32")
            runs = T.alloc_shared((threads,), "float32")
            reached = T.alloc_shared((threads,), "int32")
            positive = T.alloc_shared((threads,), "int32")
            mine = T.alloc_var("float32")
            whole = T.alloc_var("float32")
            before = T.alloc_var("float32")
            goal = T.alloc_var("float32")
            rest = T.alloc_var("int32")
            chosen = T.alloc_var("int32")
            found = T.alloc_var("int32")
            first = T.alloc_var("int32")
            final = T.alloc_var("int32")
            x = T.alloc_var("float32")
            y = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            mass = T.alloc_var("float32")
            draft_sum = T.alloc_var("float32")
            count = cu_rows[r + 1] - cu_rows[r]
            row = T.max(T.min(cu_rows[r] + accepted[r], N - 1), 0)
            j = T.max(T.min(accepted[r], G - 1), 0)
            at = T.max(T.min(slots[r], S - 1), 0)
            mass = row_mass[row]
            draft_sum = draft_mass[at, j]
            rest = T.if_then_else(T.And(accepted[r] + 1 < count, draft_sum > 0.0), 1, 0)
            whole = 0.0
            for attempt in T.serial(2):
                # a second time only if nothing is left of p - q
                if whole <= 0.0:
                    if attempt == 1:
                        rest = 0
                    for p in T.serial(P):
                        mine = 0.0
                        for i in T.serial(part):
                            v = p * PIECE + i * threads + tx
                            if T.And(i * threads + tx < PIECE, v < V):
                                x = logits[row, v]
                                weight = _chance(x, v, value[row], last[row], row_top[row], factor[row] * _LOG2E) / mass
                                if rest == 1:
                                    y = draft_logits[at, j, v]
                                    weight = weight - _chance(
                                        y, v, draft_value[at, j], draft_last[at, j], draft_top[at, j],
                                        draft_factor[at, j] * _LOG2E,
                                    ) / draft_sum  # fmt: skip
                                mine = mine + T.max(weight, 0.0)
                        sums[p, tx] = mine
                    T.sync_threads()
                    for g in T.serial(T.ceildiv(P, threads)):
                        if g * threads + tx < P:
                            mine = 0.0
                            for t in T.serial(threads):
                                mine = mine + sums[g * threads + tx, t]
                            piece[g * threads + tx] = mine
                    T.sync_threads()
                    whole = 0.0
                    for p in T.serial(P):
                        whole = whole + piece[p]
            goal = T.if_then_else(accepted[r] + 1 < count, u[row, 1], u[row, 0]) * whole
            # the piece where the running sum reaches the goal, or the last with a chance
            chosen = 0
            found = 0
            before = 0.0
            mine = 0.0
            for p in T.serial(P):
                if T.And(found == 0, piece[p] > 0.0):
                    before = before + mine
                    mine = piece[p]
                    chosen = p
                    if before + mine >= goal:
                        found = 1
            # then the same among the threads' runs of tokens, and in the run
            for again in T.serial(2):
                reached[tx] = V
                positive[tx] = -1
                mine = 0.0
                for i in T.serial(part):
                    v = chosen * PIECE + tx * part + i
                    if T.And(tx * part + i < PIECE, v < V):
                        at_v = T.min(v, V - 1)
                        x = logits[row, at_v]
                        weight = _chance(x, v, value[row], last[row], row_top[row], factor[row] * _LOG2E) / mass
                        if rest == 1:
                            y = draft_logits[at, j, at_v]
                            weight = weight - _chance(
                                y, v, draft_value[at, j], draft_last[at, j], draft_top[at, j],
                                draft_factor[at, j] * _LOG2E,
                            ) / draft_sum  # fmt: skip
                        if weight > 0.0:
                            mine = mine + weight
                            positive[tx] = v
                            if T.And(again == 1, T.And(before + mine >= goal, reached[tx] == V)):
                                reached[tx] = v
                if again == 0:
                    runs[tx] = mine
                    T.sync_threads()
                    for t in T.serial(threads):
                        if t < tx:
                            before = before + runs[t]
            T.sync_threads()
            if tx == 0:
                first = V
                final = 0
                for t in T.serial(threads):
                    first = T.min(first, reached[t])
                    final = T.max(final, positive[t])
                if first == V:
                    first = final
                tokens[r] = T.if_then_else(count > 0, T.cast(first, "int64"), T.int64(-1))

    return token
