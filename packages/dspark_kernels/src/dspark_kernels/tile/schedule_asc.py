"""The schedule as a TileLang program for an Ascend 950: one vector core, one SIMT thread a request.

Needs tilelang. It was lowered to AscendC and never ran on a device. Ranks are counted, draft by draft: order of
threads does not matter, and no thread waits inside a region.
"""

from typing import Any

import tilelang.ascend.language as T

from dspark_kernels.results import MOST_DRAFTS

MOST_REQUESTS = 1024


def schedule_program(R: int, G: int, N: int, S: int) -> Any:
    """Lengths, cumulative rows, and owner, place and source of N rows; see `dspark_kernels.schedule`.

    R is a multiple of 8 and N too (32-byte copies). The keys of all drafts stand in the unified buffer: 4 R G bytes of
    the 32 KiB that are allowed for them. The tokens and positions of rows are gathered by `source` behind it.
    """
    if not (8 <= R <= MOST_REQUESTS and R % 8 == 0 and N % 8 == 0 and 1 <= G <= MOST_DRAFTS):
        raise ValueError(f"R, G, N: got {R}, {G}, {N}, allowed are multiples of 8 up to {MOST_REQUESTS} requests")

    @T.prim_func
    def schedule(
        confidence: T.Tensor[(S, G), T.float32],
        limits: T.Tensor[(R,), T.int32],
        slots: T.Tensor[(R,), T.int32],
        fixed: T.Tensor[(R,), T.int32],
        budget: T.Tensor[(8,), T.int32],
        lengths: T.Tensor[(R,), T.int32],
        upto: T.Tensor[(R,), T.int32],
        owner: T.Tensor[(N,), T.int32],
        place: T.Tensor[(N,), T.int32],
        source: T.Tensor[(N,), T.int32],
    ):
        with T.Kernel(1) as _:
            limit_ub = T.alloc_shared((R,), T.int32)
            slot_ub = T.alloc_shared((R,), T.int32)
            fixed_ub = T.alloc_shared((R,), T.int32)
            budget_ub = T.alloc_shared((8,), T.int32)
            keys = T.alloc_shared((G, R), T.float32)
            need = T.alloc_shared((R,), T.int32)
            length_ub = T.alloc_shared((R,), T.int32)
            upto_ub = T.alloc_shared((R,), T.int32)
            owner_ub = T.alloc_shared((N,), T.int32)
            place_ub = T.alloc_shared((N,), T.int32)
            source_ub = T.alloc_shared((N,), T.int32)
            T.copy(limits, limit_ub)
            T.copy(slots, slot_ub)
            T.copy(fixed, fixed_ub)
            T.copy(budget, budget_ub)
            with T.SimtVF(threads=R):
                r = T.get_thread_binding(0)
                here = T.alloc_var(T.int32, init=-1)
                if slot_ub[r] >= 0:
                    here = T.min(limit_ub[r], G)
                running = T.alloc_var(T.float32, init=1.0)
                for j in T.serial(G):
                    c = T.alloc_var(T.float32, init=0.0)
                    if here >= 0:
                        c = confidence[slot_ub[r], j]
                    if c > 0.0:
                        running = running * T.min(c, 1.0)
                    else:
                        running = 0.0
                    keys[j, r] = -1.0
                    if fixed_ub[r] < 0 and j < here:
                        keys[j, r] = running
                own = T.alloc_var(T.int32, init=0)
                if here >= 0:
                    own = 1 + T.max(0, T.min(fixed_ub[r], here))
                need[r] = own
            with T.SimtVF(threads=R):
                r = T.get_thread_binding(0)
                needed = T.alloc_var(T.int32, init=0)
                for i in T.serial(R):
                    needed = needed + need[i]
                wanted = T.alloc_var(T.int32, init=0)
                wanted = T.min(T.max(budget_ub[0], 0), N - needed)
                mine = T.alloc_var(T.int32, init=0)
                for j in T.serial(G):
                    rank = T.alloc_var(T.int32, init=0)
                    for k in T.serial(G):
                        for i in T.serial(R):
                            if keys[k, i] > keys[j, r]:
                                rank = rank + 1
                            if keys[k, i] == keys[j, r] and (k < j or (k == j and i < r)):
                                rank = rank + 1
                    if keys[j, r] >= 0.0 and rank < wanted:
                        mine = mine + 1
                length_ub[r] = 0
                if need[r] > 0 and needed <= N:
                    length_ub[r] = need[r] - 1 + mine
            with T.SimtVF(threads=R):
                r = T.get_thread_binding(0)
                before = T.alloc_var(T.int32, init=0)
                needed = T.alloc_var(T.int32, init=0)
                for i in T.serial(R):
                    needed = needed + need[i]
                for i in T.serial(R):
                    if i < r and need[i] > 0:
                        before = before + 1 + length_ub[i]
                count = T.alloc_var(T.int32, init=0)
                if need[r] > 0 and needed <= N:
                    count = 1 + length_ub[r]
                upto_ub[r] = before + count
                for i in T.serial(T.ceildiv(N, R)):
                    at = i * R + r
                    if at < N:
                        owner_ub[at] = -1
                        place_ub[at] = 0
                        source_ub[at] = -1
            with T.SimtVF(threads=R):
                r = T.get_thread_binding(0)
                start = T.alloc_var(T.int32, init=0)
                if r > 0:
                    start = upto_ub[r - 1]
                for j in T.serial(G + 1):
                    if start + j < upto_ub[r]:
                        owner_ub[start + j] = r
                        place_ub[start + j] = j
                        source_ub[start + j] = slot_ub[r] * (G + 1) + j
            T.copy(length_ub, lengths)
            T.copy(upto_ub, upto)
            T.copy(owner_ub, owner)
            T.copy(place_ub, place)
            T.copy(source_ub, source)

    return schedule
