"""The schedule of a step as a TileLang program for NVIDIA GPUs: two searches that count, then the layout.

Needs tilelang. The annotations of a program are evaluated, so this file keeps them as they are (no string ones).
"""

from typing import Any

import tilelang.language as T

from dspark_kernels.results import MOST_DRAFTS

MOST_REQUESTS = 1024
_ONE_BITS = 0x3F800000  # of 1.0f, the largest survival
_KEY_STEPS, _PLACE_STEPS = 30, 14  # halvings of the keys' range, and of 8192 places


def schedule_program(R: int, G: int, N: int, S: int, threads: int = 256) -> Any:
    """A TileLang function of R requests, G drafts, N rows and tables of S rows; see `dspark_kernels.schedule`.

    Arguments in order: confidence, tokens, starts, limits, slots, fixed, budget, then the tensors of `Schedule`. Slots
    and fixed lengths are always given (fixed -1 for none). Raises ValueError for sizes that a block cannot hold.
    """
    if not (1 <= R <= MOST_REQUESTS and 1 <= G <= MOST_DRAFTS):
        raise ValueError(f"R, G: got {R}, {G}, allowed is up to {MOST_REQUESTS} requests of up to {MOST_DRAFTS} drafts")
    M = R * G
    # Fragments are whole multiples of the threads.
    MP, RP = -(-M // threads) * threads, -(-R // threads) * threads

    @T.prim_func
    def schedule(
        confidence: T.Tensor[(S, G), T.float32],
        tokens: T.Tensor[(S, G + 1), T.int64],
        starts: T.Tensor[(S,), T.int64],
        limits: T.Tensor[(R,), T.int32],
        slots: T.Tensor[(R,), T.int32],
        fixed: T.Tensor[(R,), T.int32],
        budget: T.Tensor[(1,), T.int32],
        lengths: T.Tensor[(R,), T.int32],
        cu_rows: T.Tensor[(R + 1,), T.int32],
        survival: T.Tensor[(R, G), T.float32],
        owner: T.Tensor[(N,), T.int32],
        place: T.Tensor[(N,), T.int32],
        source: T.Tensor[(N,), T.int32],
        row_of: T.Tensor[(R, G + 1), T.int32],
        inputs: T.Tensor[(N,), T.int64],
        positions: T.Tensor[(N,), T.int64],
        kv_lengths: T.Tensor[(R,), T.int32],
        host: T.Tensor[(R + 1,), T.int32],
    ):
        with T.Kernel(1, threads=threads) as _:
            keys = T.alloc_shared((MP,), "int32")
            count = T.alloc_shared((R,), "int32")
            upto = T.alloc_shared((R,), "int32")
            hits = T.alloc_fragment((MP,), "int32")
            need = T.alloc_fragment((RP,), "int32")
            total = T.alloc_fragment((1,), "int32")
            asked = T.alloc_fragment((RP,), "int32")
            most = T.alloc_fragment((1,), "int32")
            wanted = T.alloc_var("int32")
            low = T.alloc_var("int32")
            high = T.alloc_var("int32")
            T.fill(keys, -1)
            T.fill(need, 0)
            for r in T.Parallel(RP):
                if r < R:
                    here = T.And(slots[r] >= 0, limits[r] >= 0)
                    need[r] = T.if_then_else(here, 1 + T.max(0, T.min(fixed[r], T.min(limits[r], G))), 0)
            T.reduce_sum(need, total, dim=0)
            needed = total[0]
            for r in T.Parallel(RP):  # a read of its own would be done by one thread, for itself alone
                asked[r] = T.max(budget[0], 0)
            T.reduce_max(asked, most, dim=0)
            wanted = T.min(most[0], N - total[0])
            fits = T.alloc_var("bool")
            fits = total[0] <= N
            for r in T.Parallel(R):
                running = T.alloc_var("float32")
                running = 1.0
                here = T.if_then_else(T.And(fits, slots[r] >= 0), limits[r], -1)
                for j in T.serial(G):
                    c = confidence[T.max(slots[r], 0), j]
                    running = running * T.if_then_else(c > 0.0, T.min(c, 1.0), 0.0)
                    survival[r, j] = T.if_then_else(here >= 0, running, 0.0)
                    keys[j * R + r] = T.if_then_else(T.And(j < here, fixed[r] < 0), T.reinterpret(running, "int32"), -1)
            # the largest key that `wanted` keys reach; 0 where there are fewer
            low = 0
            high = _ONE_BITS + 1
            for _s in T.serial(_KEY_STEPS):
                middle = low + (high - low) // 2
                for i in T.Parallel(MP):
                    hits[i] = T.if_then_else(keys[i] >= middle, 1, 0)
                T.reduce_sum(hits, total, dim=0)
                if total[0] >= wanted:
                    low = middle
                else:
                    high = middle
            # equal ones by place and request, which is how keys stand
            for i in T.Parallel(MP):
                hits[i] = T.if_then_else(keys[i] > low, 1, 0)
            T.reduce_sum(hits, total, dim=0)
            left = T.alloc_var("int32")
            left = wanted - total[0]
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            first = 0
            end = M
            for _s in T.serial(_PLACE_STEPS):
                middle = first + (end - first) // 2
                for i in T.Parallel(MP):
                    hits[i] = T.if_then_else(T.And(keys[i] == low, i < middle), 1, 0)
                T.reduce_sum(hits, total, dim=0)
                if total[0] >= left:
                    end = middle
                else:
                    first = middle + 1
            for r in T.Parallel(R):
                here = T.if_then_else(T.And(fits, slots[r] >= 0), limits[r], -1)
                length = T.alloc_var("int32")
                length = T.max(0, T.min(fixed[r], T.min(here, G)))
                for j in T.serial(G):
                    key = keys[j * R + r]
                    if T.Or(key > low, T.And(key == low, j * R + r < end)):
                        length = length + 1
                lengths[r] = length
                host[r] = length
                kv_lengths[r] = T.if_then_else(here >= 0, T.cast(starts[T.max(slots[r], 0)], "int32") + 1 + length, 0)
                count[r] = T.if_then_else(here >= 0, 1 + length, 0)
            T.copy(count, upto)
            T.cumsum(upto, dim=0)
            for i in T.Parallel(N):
                owner[i] = -1
                place[i] = 0
                source[i] = -1
                inputs[i] = T.int64(0)
                positions[i] = T.int64(0)
            T.sync_threads()
            for r in T.Parallel(R):
                slot = T.max(slots[r], 0)
                before = upto[r] - count[r]
                cu_rows[r] = before
                for j in T.serial(G + 1):
                    row_of[r, j] = T.if_then_else(j < count[r], before + j, -1)
                    if j < count[r]:
                        owner[before + j] = r
                        place[before + j] = j
                        source[before + j] = slot * (G + 1) + j
                        inputs[before + j] = tokens[slot, j]
                        positions[before + j] = starts[slot] + T.int64(j)
            if T.get_thread_binding() == 0:
                cu_rows[R] = upto[R - 1]
                host[R] = T.if_then_else(fits, upto[R - 1], -needed)

    return schedule
