"""Index scores: MXFP4 queries against MXFP4 keys on the cube, relu, weights of heads and their sum on vector cores.

A block takes one query row and 128 compressed positions at a time. Both operands go to the cube as they lie in memory:
codes and scales of a page are two strided views of the same bytes. Each vector core sums the heads of 64 positions in
the order of the heads, so a score depends on its row and its key alone.
"""

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S

from cann_ops.tile.cores import CUBE_CORES

DIM = 128
FP4 = "float4_e2m1fn"
KEYS = 128  # of a step
HALF = KEYS // 2


def program(heads: int, rows_per_block: int) -> Any:
    """q_codes float4_e2m1fn [n, H, 128], q_scales int16 [n, H, 2] (two UE8M0 bytes), head_weights float32 [n, H];
    key_codes float4_e2m1fn [blocks, P, 128] and key_scales int16 [blocks, P, 2], views of pages of P · 68 bytes;
    table int32 [b, m], request int32 [n], visible int32 [n]; scores float32 [n, width], of which chunks of 128 with a
    visible position are written, -inf where it is not visible.
    """
    if heads not in (16, 32, 64) or rows_per_block not in (32, 64, 128):
        raise ValueError(f"heads, rows_per_block: got {heads}, {rows_per_block}, allowed are 16, 32, 64; 32, 64, 128")
    P = rows_per_block
    n, blocks, b, m, width = (T.dynamic(name) for name in ("n", "blocks", "b", "m", "width"))

    @T.prim_func
    def index_scores(
        q_codes: T.Tensor[(n, heads, DIM), FP4],
        q_scales: T.Tensor[(n, heads, 2), T.int16],
        head_weights: T.Tensor[(n, heads), T.float32],
        key_codes: T.StridedTensor[(blocks, P, DIM), (P * (DIM + 8), DIM, 1), FP4],
        key_scales: T.StridedTensor[(blocks, P, 2), (P * 34, 2, 1), T.int16],
        table: T.Tensor[(b, m), T.int32],
        request: T.Tensor[(n,), T.int32],
        visible: T.Tensor[(n,), T.int32],
        scores: T.Tensor[(n, width), T.float32],
    ):
        with T.MixedKernel(CUBE_CORES) as (core, sid):
            q_l1 = T.alloc_l1((heads, DIM), FP4)
            q_sf = T.alloc_l1((heads, 2), T.int16)
            k_l1 = T.alloc_l1((KEYS, DIM), FP4)
            k_sf = T.alloc_l1((KEYS, 2), T.int16)
            product = T.alloc_l0c((heads, KEYS), T.float32)
            part = T.alloc_shared((heads, HALF), T.float32)
            weight = T.alloc_shared((heads,), T.float32)
            out = T.alloc_shared((HALF,), T.float32)
            chunks = T.ceildiv(width, KEYS)
            for task in T.serial(T.ceildiv(n * chunks - core, CUBE_CORES)):
                t = T.alloc_var(T.int32, init=(task * CUBE_CORES + core) // chunks)
                first = T.alloc_var(T.int32, init=(task * CUBE_CORES + core - t * chunks) * KEYS)
                shown = T.alloc_var(T.int32, init=visible[t])
                if first < shown:
                    T.copy(q_codes[t, :, :], q_l1)
                    T.copy(q_scales[t, :, :], q_sf)
                    T.copy(head_weights[t, :], weight)
                    for i in T.serial(KEYS // P):
                        page = T.min(first // P + i, (shown - 1) // P)
                        block = table[request[t], page]
                        T.copy(key_codes[block, :, :], k_l1[i * P : i * P + P, :])
                        T.copy(key_scales[block, :, :], k_sf[i * P : i * P + P, :])
                    T.gemm_blockscaled(q_l1, k_l1, product, q_sf, k_sf, transpose_B=True, clear_accum=True)
                    T.dual_copy(product, part)
                    seen = T.alloc_var(T.int32, init=shown - first - sid * HALF)
                    with T.SimdVF():
                        lane = S.vci(0, T.int32)
                        there = S.vcmps(lane, seen, op="lt")
                        total = S.alloc_var(T.float32)
                        total = S.vdup(0.0, T.float32)
                        for h in T.serial(T.uint16(heads)):
                            dot = S.vrelu(S.vld(part[h, 0]))
                            total = S.vadd(total, S.vmul(dot, S.vld(weight[h], dist="BRC_B32")))
                        S.vsts(out[0], S.vsel(total, S.vdup(-T.infinity(T.float32), T.float32), there))
                    T.copy(out, scores[t, first + sid * HALF : first + sid * HALF + HALF])

    return index_scores
