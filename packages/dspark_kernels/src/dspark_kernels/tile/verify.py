"""Verification of unfiltered rows as TileLang programs for NVIDIA GPUs: statistics of pieces, decisions, last tokens.

The same steps as the CUDA kernels, for temperature alone (no top-p, no top-k, no coupled requests). A number of a whole
block is stored by all its threads alike: a condition on the thread would bind its fragments to one thread. Needs
tilelang; the annotations of a program are evaluated, so this file keeps them as they are (no string ones).
"""

from typing import Any

import tilelang.language as T

PIECE = 4096  # tokens of a row that a block reads at once
_LOG2E = 1.4426950408889634


def pieces(V: int) -> int:
    """Pieces of a row of V tokens."""
    return -(-V // PIECE)


def stats_program(N: int, V: int, threads: int = 256) -> Any:
    """logits float32 [N, V], factor float32 [N] (1 / temperature) to top, plain, warm float32 [N, pieces].

    The largest logit of a piece, and its sums of e^(x - top) and of e^((x - top) * factor): the one read of a row.
    """
    P = pieces(V)

    @T.prim_func
    def stats(
        logits: T.Tensor[(N, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        top: T.Tensor[(N, P), T.float32],
        plain: T.Tensor[(N, P), T.float32],
        warm: T.Tensor[(N, P), T.float32],
    ):
        with T.Kernel(P, N, threads=threads) as (p, n):
            x = T.alloc_fragment((PIECE,), "float32")
            e = T.alloc_fragment((PIECE,), "float32")
            most = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(logits[n, p * PIECE : (p + 1) * PIECE], x)
            for i in T.Parallel(PIECE):
                x[i] = T.if_then_else(p * PIECE + i < V, x[i], -T.infinity("float32"))
            T.reduce_max(x, most, dim=0)
            for i in T.Parallel(PIECE):
                e[i] = T.exp2((x[i] - most[0]) * _LOG2E)
            T.reduce_sum(e, total, dim=0)
            top[n, p] = most[0]
            plain[n, p] = total[0]
            for i in T.Parallel(PIECE):
                e[i] = T.exp2((x[i] - most[0]) * factor[n] * _LOG2E)
            T.reduce_sum(e, total, dim=0)
            warm[n, p] = total[0]

    return stats


def decide_program(R: int, G: int, N: int, V: int, S: int, threads: int = 64) -> Any:
    """Accepted drafts of R requests from the statistics: accepted int32 [R], and top and mass float32 [N] of the rows.

    u float32 [N]: draw 2 at the decided positions. A request's thread block combines the pieces of its rows in order.
    """
    P = pieces(V)
    most_pieces = -(-P // threads) * threads

    @T.prim_func
    def decide(
        logits: T.Tensor[(N, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        top: T.Tensor[(N, P), T.float32],
        warm: T.Tensor[(N, P), T.float32],
        cu_rows: T.Tensor[(R + 1,), T.int32],
        slots: T.Tensor[(R,), T.int32],
        drafts: T.Tensor[(S, G), T.int64],
        log_q: T.Tensor[(S, G), T.float32],
        u: T.Tensor[(N,), T.float32],
        row_top: T.Tensor[(N,), T.float32],
        row_mass: T.Tensor[(N,), T.float32],
        accepted: T.Tensor[(R,), T.int32],
    ):
        with T.Kernel(R, threads=threads) as r:
            t = T.alloc_fragment((most_pieces,), "float32")
            w = T.alloc_fragment((most_pieces,), "float32")
            most = T.alloc_fragment((1,), "float32")
            mass = T.alloc_fragment((1,), "float32")
            stands = T.alloc_var("int32")
            open_ = T.alloc_var("int32")
            stands = 0
            open_ = 1
            first = cu_rows[r]
            for j in T.serial(G + 1):
                row = first + j
                if row < cu_rows[r + 1]:
                    for i in T.Parallel(most_pieces):
                        t[i] = T.if_then_else(i < P, top[row, T.min(i, P - 1)], -T.infinity("float32"))
                    T.reduce_max(t, most, dim=0)
                    for i in T.Parallel(most_pieces):
                        scale = T.exp2((t[i] - most[0]) * factor[row] * _LOG2E)
                        w[i] = T.if_then_else(i < P, warm[row, T.min(i, P - 1)] * scale, 0.0)
                    T.reduce_sum(w, mass, dim=0)
                    row_top[row] = most[0]
                    row_mass[row] = mass[0]
                    if row + 1 < cu_rows[r + 1]:
                        at = T.max(slots[r], 0)
                        draft = drafts[at, T.min(j, G - 1)]
                        token = T.max(T.min(draft, T.int64(V - 1)), T.int64(0))
                        log_p = (logits[row, token] - most[0]) * factor[row] - T.log(mass[0])
                        chance = T.exp2((log_p - log_q[at, T.min(j, G - 1)]) * _LOG2E)
                        if T.And(open_ == 1, T.And(draft == token, u[row] < chance)):
                            stands = stands + 1
                        else:
                            open_ = 0
            accepted[r] = stands

    return decide


def token_program(R: int, G: int, N: int, V: int, S: int, threads: int = 256) -> Any:
    """The token behind the accepted drafts: int64 [R], -1 for a padding request.

    From max(p - q, 0) with u[n, 1] (draw 3) behind a rejection, from p with u[n, 0] (draw 0) otherwise. draft_top,
    draft_factor, draft_mass float32 [S, G] are the records' columns. Two passes over the row: sums of pieces, then the
    piece where the running sum reaches the draw.
    """
    P = pieces(V)
    most_pieces = -(-P // threads) * threads

    @T.prim_func
    def token(
        logits: T.Tensor[(N, V), T.float32],
        draft_logits: T.Tensor[(S, G, V), T.float32],
        factor: T.Tensor[(N,), T.float32],
        row_top: T.Tensor[(N,), T.float32],
        row_mass: T.Tensor[(N,), T.float32],
        draft_top: T.Tensor[(S, G), T.float32],
        draft_factor: T.Tensor[(S, G), T.float32],
        draft_mass: T.Tensor[(S, G), T.float32],
        cu_rows: T.Tensor[(R + 1,), T.int32],
        slots: T.Tensor[(R,), T.int32],
        accepted: T.Tensor[(R,), T.int32],
        u: T.Tensor[(N, 2), T.float32],
        tokens: T.Tensor[(R,), T.int64],
    ):
        with T.Kernel(R, threads=threads) as r:
            e = T.alloc_fragment((PIECE,), "float32")
            place = T.alloc_fragment((PIECE,), "int32")
            total = T.alloc_fragment((1,), "float32")
            lowest = T.alloc_fragment((1,), "int32")
            sums = T.alloc_shared((most_pieces,), "float32")
            running = T.alloc_shared((PIECE,), "float32")
            chosen = T.alloc_var("int32")
            before = T.alloc_var("float32")
            whole = T.alloc_var("float32")
            count = cu_rows[r + 1] - cu_rows[r]
            row = T.min(cu_rows[r] + accepted[r], N - 1)
            j = T.min(accepted[r], G - 1)
            at = T.max(slots[r], 0)
            rest = T.if_then_else(accepted[r] + 1 < count, 1.0, 0.0)
            for p in T.serial(P):
                for i in T.Parallel(PIECE):
                    v = p * PIECE + i
                    known = v < V
                    a = T.exp2((logits[row, T.min(v, V - 1)] - row_top[row]) * factor[row] * _LOG2E) / row_mass[row]
                    b = T.exp2((draft_logits[at, j, T.min(v, V - 1)] - draft_top[at, j]) * draft_factor[at, j] * _LOG2E)
                    e[i] = T.if_then_else(known, T.max(a - rest * b / draft_mass[at, j], 0.0), 0.0)
                T.reduce_sum(e, total, dim=0)
                sums[p] = total[0]
            T.sync_threads()
            whole = 0.0
            for p in T.serial(P):
                whole = whole + sums[p]
            goal = T.if_then_else(rest > 0.5, u[row, 1], u[row, 0]) * whole
            chosen = P - 1
            before = 0.0
            found = T.alloc_var("int32")
            found = 0
            for p in T.serial(P):
                if found == 0:
                    if before + sums[p] >= goal:
                        chosen = p
                        found = 1
                    else:
                        before = before + sums[p]
            for i in T.Parallel(PIECE):
                v = chosen * PIECE + i
                a = T.exp2((logits[row, T.min(v, V - 1)] - row_top[row]) * factor[row] * _LOG2E) / row_mass[row]
                b = T.exp2((draft_logits[at, j, T.min(v, V - 1)] - draft_top[at, j]) * draft_factor[at, j] * _LOG2E)
                e[i] = T.if_then_else(v < V, T.max(a - rest * b / draft_mass[at, j], 0.0), 0.0)
            T.copy(e, running)
            T.cumsum(running, dim=0)
            for i in T.Parallel(PIECE):
                reached = T.And(e[i] > 0.0, before + running[i] >= goal)
                place[i] = T.if_then_else(reached, i, PIECE)
            T.reduce_min(place, lowest, dim=0)
            last = T.min(V - 1, chosen * PIECE + T.min(lowest[0], PIECE - 1))
            tokens[r] = T.if_then_else(count > 0, T.cast(last, "int64"), T.int64(-1))

    return token
