"""Attention of H heads over gathered cache rows that are keys and values at once: cube and vector cores together.

A block takes one query row after another. 64 keys at a time: each of its two vector cores fetches 32 rows and widens
them to bfloat16 (exact), the cube multiplies q by the keys, each vector core does the softmax of half of the heads,
the cube multiplies the weights by the same keys, and the vector cores add the result to a float32 sum that stays in the
unified buffer. A key that is not there is a row of zeros and has weight 0, so no byte that nobody named takes part.
"""

from typing import Any

import tilelang.ascend.language as T
from tilelang.ascend.language import simd as S
from tilelang.layout import make_ascend_compact_nz_layout

from cann_ops.tile.cores import CUBE_CORES

D = 512
KEYS = 64  # of a step
HALF = KEYS // 2  # rows that one vector core fetches
ROPE = 64
WINDOW_ROW, MAIN_ROW = D + D // 32, D // 2 + D // 16
_PITCH = 544  # WINDOW_ROW in whole blocks of 32 bytes
_NEVER = -1.0e30


@T.macro
def widen_window(raw, scale, kv):
    """Rows of E4M3 codes and UE8M0 scales of 32 values to bfloat16."""
    for r in T.serial(T.uint16(HALF)):
        power = S.vshls(T.reinterpret(S.vld(raw[r, D], dist="UNPK_B8"), "uint16x128"), 7)
        once = T.reinterpret(power, "bfloat16x128")
        twice, _rest = S.vintlv(once, once)  # a block of 32 bytes holds 16 values
        S.vsts(scale[r, 0], twice, dist="NORM_B16")
    S.mem_bar("VST_VLD")
    for r in T.serial(T.uint16(HALF)):
        for c in T.serial(T.uint16(D // 128)):
            code = T.reinterpret(S.vld(raw[r, c * 128], dist="UNPK_B8"), "float8_e4m3fnx256")
            even = S.vcvt(S.vcvt(code, T.float32, part=0), T.bfloat16, part=0)
            odd = S.vcvt(S.vcvt(code, T.float32, part=2), T.bfloat16, part=1)
            both = S.vor(T.reinterpret(even, "uint16x128"), T.reinterpret(odd, "uint16x128"))
            value = T.reinterpret(both, "bfloat16x128")
            S.vsts(kv[r, c * 128], S.vmul(value, S.vld(scale[r, c * 8], dist="E2B_B16")), dist="NORM_B16")


@T.macro
def widen_main(raw, scale, kv):
    """Rows of E2M1 codes and E4M3 scales of 16 values to bfloat16."""
    groups = S.update_mask(T.uint32(D // 16), 32)
    for r in T.serial(T.uint16(HALF)):
        code = T.reinterpret(S.vld(raw[r, D // 2], dist="UNPK4_B8"), "float8_e4m3fnx256")
        factor = S.vcvt(S.vcvt(code, T.float32, part=0), T.bfloat16, part=0)
        S.vsts(scale[r, 0], factor, groups, dist="PK_B32", extent=D // 16)
    S.mem_bar("VST_VLD")
    for r in T.serial(T.uint16(HALF)):
        for c in T.serial(T.uint16(D // 128)):
            code = T.reinterpret(S.vld(raw[r, c * 64], dist="UNPK4_B8"), "float4_e2m1fnx512")
            value = S.vcvt(code, T.bfloat16, part=0)
            S.vsts(kv[r, c * 128], S.vmul(value, S.vld(scale[r, c * 8], dist="E2B_B16")), dist="NORM_B16")


@T.macro
def softmax_step(heads, places, scores, scale, top, total, shrink, weights):
    """The running softmax over 64 more scores of each head. Keys whose place is -1 weigh nothing."""
    one = S.pset(32, "PAT_VL1")
    there = S.vcmps(S.vld(places[0]), T.int32(0), op="ge")
    zero = S.vdup(0.0, T.float32)
    never = S.vdup(_NEVER, T.float32)
    for h in T.serial(T.uint16(heads)):
        x = S.vsel(S.vmuls(S.vld(scores[h, 0]), scale), never, there)
        before = S.vld(top[h], dist="BRC_B32")
        sum_before = S.vld(total[h], dist="BRC_B32")
        most = S.vdupv(S.vcmax(S.vmax(x, before)))
        weight = S.vsel(S.vexpdif(x, most), zero, there)
        less = S.vexpdif(before, most)
        S.vsts(total[h], S.vadd(S.vmul(sum_before, less), S.vcadd(weight)), one, dist="ONEPT_B32")
        S.vsts(top[h], most, one, dist="ONEPT_B32")
        S.vsts(shrink[h], less, one, dist="ONEPT_B32")
        S.vsts(weights[h, 0], S.vcvt(weight, T.bfloat16), dist="PK_B32")


@T.macro
def finish(heads, out, top, total, sink, turns, result):
    """Divide by the sum with the sink in it, turn the last channels back, round to bfloat16."""
    other = S.vxor(T.reinterpret(S.vci(0, T.int32), "uint32x64"), S.vdup(T.uint32(32), T.uint32))
    cosine = S.vld(turns[0])
    sine = S.vselr(cosine, other)
    least = S.vdup(1.0e-37, T.float32)
    for h in T.serial(T.uint16(heads)):
        pull = S.vexpdif(S.vld(sink[h], dist="BRC_B32"), S.vld(top[h], dist="BRC_B32"))
        below = S.vmax(S.vadd(S.vld(total[h], dist="BRC_B32"), pull), least)
        for c in T.serial(T.uint16((D - ROPE) // 64)):
            share = S.vdiv(S.vld(out[h, c * 64]), below, precision="exact")
            S.vsts(result[h, c * 64], S.vcvt(share, T.bfloat16), dist="PK_B32")
        tail = S.vdiv(S.vld(out[h, D - ROPE]), below, precision="exact")
        a, b = S.vdintlv(tail, tail)
        even = S.vadd(S.vmul(a, cosine), S.vmul(b, sine))
        odd = S.vsub(S.vmul(b, cosine), S.vmul(a, sine))
        back, _rest = S.vintlv(even, odd)
        S.vsts(result[h, D - ROPE], S.vcvt(back, T.bfloat16), dist="PK_B32")


def program(heads: int, near_steps: int, far_steps: int) -> Any:
    """q bfloat16 [n, H, 512]; ring uint8 [ring_rows, 528], new_rows uint8 [n_new, 528], pages uint8 [page_rows, 288];
    nothing uint8 [544], zeros; near int32 [n, near_steps · 64]: row of the ring, or ring_rows + row of new_rows, or -1;
    far int32 [n, max(far_steps, 1) · 64]: row of pages or -1; steps int32 [n]: steps that a row has keys in, near ones
    first; sink float32 [H]; turns float32 [n, 64]; scale float32; out bfloat16 [n, H, 512].
    """
    # A vector core has half of the heads, and lays out 16 rows at a time for the cube.
    if heads not in (32, 64) or near_steps < 1 or far_steps < 0:
        raise ValueError(f"heads, steps: got {heads}, {near_steps}, {far_steps}, allowed are 32 or 64 heads, 1 and 0")
    half = heads // 2
    far_width = max(far_steps, 1) * KEYS
    n, n_new = T.dynamic("n"), T.dynamic("n_new")
    ring_rows, page_rows = T.dynamic("ring_rows"), T.dynamic("page_rows")

    @T.prim_func
    def latent_attention(
        q: T.Tensor[(n, heads, D), T.bfloat16],
        ring: T.Tensor[(ring_rows, WINDOW_ROW), T.uint8],
        new_rows: T.Tensor[(n_new, WINDOW_ROW), T.uint8],
        pages: T.Tensor[(page_rows, MAIN_ROW), T.uint8],
        nothing: T.Tensor[(_PITCH,), T.uint8],
        near: T.Tensor[(n, near_steps * KEYS), T.int32],
        far: T.Tensor[(n, far_width), T.int32],
        steps: T.Tensor[(n,), T.int32],
        sink: T.Tensor[(heads,), T.float32],
        turns: T.Tensor[(n, ROPE), T.float32],
        out: T.Tensor[(n, heads, D), T.bfloat16],
        scale: T.float32,
    ):
        with T.MixedKernel(CUBE_CORES) as (core, sid):
            q_l1 = T.alloc_l1((heads, D), T.bfloat16)
            kv_l1 = T.alloc_l1((KEYS, D), T.bfloat16)
            p_l1 = T.alloc_l1((heads, KEYS), T.bfloat16)
            q_a = T.alloc_l0a((heads, 128), T.bfloat16)
            k_b = T.alloc_l0b((KEYS, 128), T.bfloat16)
            p_a = T.alloc_l0a((heads, KEYS), T.bfloat16)
            v_b = T.alloc_l0b((KEYS, 256), T.bfloat16)
            s_c = T.alloc_l0c((heads, KEYS), T.float32)
            o_c = T.alloc_l0c((heads, 256), T.float32)
            raw = T.alloc_shared((HALF, _PITCH), T.uint8)
            factors = T.alloc_shared((HALF, 128), T.bfloat16)
            kv = T.alloc_shared((HALF, D), T.bfloat16)
            kv_nz = T.alloc_shared((HALF + 1, D), T.bfloat16)
            scores = T.alloc_shared((half, KEYS), T.float32)
            weights = T.alloc_shared((half, KEYS), T.bfloat16)
            weights_nz = T.alloc_shared((half + 1, KEYS), T.bfloat16)
            summed = T.alloc_shared((half, D), T.float32)
            part = T.alloc_shared((half, 256), T.float32)
            result = T.alloc_shared((half, D), T.bfloat16)
            top = T.alloc_shared((half,), T.float32)
            total = T.alloc_shared((half,), T.float32)
            shrink = T.alloc_shared((half,), T.float32)
            sinks = T.alloc_shared((half,), T.float32)
            turn = T.alloc_shared((ROPE,), T.float32)
            places = T.alloc_shared((KEYS,), T.int32)
            T.annotate_layout(
                {kv_nz: make_ascend_compact_nz_layout(kv_nz), weights_nz: make_ascend_compact_nz_layout(weights_nz)}
            )
            T.annotate_buffer_versions({top: 1, total: 1, summed: 1, shrink: 1})
            T.copy(sink[sid * half : sid * half + half], sinks)
            for task in T.serial(T.ceildiv(n - core, CUBE_CORES)):
                t = task * CUBE_CORES + core
                T.copy(q[t, :, :], q_l1)
                T.copy(turns[t, :], turn)
                with T.SimdVF():
                    all_heads = S.update_mask(T.uint32(half), 32)
                    zero = S.vdup(0.0, T.float32)
                    S.vsts(top[0], S.vdup(_NEVER, T.float32), all_heads, extent=half)
                    S.vsts(total[0], zero, all_heads, extent=half)
                    for h in T.serial(T.uint16(half)):
                        for c in T.serial(T.uint16(D // 64)):
                            S.vsts(summed[h, c * 64], zero)
                for step in T.serial(near_steps + far_steps):
                    if step < steps[t]:
                        if step < near_steps:
                            T.copy(near[t, step * KEYS : step * KEYS + KEYS], places)
                            for r in T.serial(HALF):
                                place = T.alloc_var(T.int32, init=places[sid * HALF + r])
                                if place < 0:
                                    T.copy(nothing[0:WINDOW_ROW], raw[r, :WINDOW_ROW])
                                else:
                                    if place < ring_rows:
                                        T.copy(ring[place, :], raw[r, :WINDOW_ROW])
                                    else:
                                        T.copy(new_rows[place - ring_rows, :], raw[r, :WINDOW_ROW])
                            with T.SimdVF():
                                widen_window(raw, factors, kv)
                        else:
                            first = (step - near_steps) * KEYS
                            T.copy(far[t, first : first + KEYS], places)
                            for r in T.serial(HALF):
                                place = T.alloc_var(T.int32, init=places[sid * HALF + r])
                                if place < 0:
                                    T.copy(nothing[0:MAIN_ROW], raw[r, :MAIN_ROW])
                                else:
                                    T.copy(pages[place, :], raw[r, :MAIN_ROW])
                            with T.SimdVF():
                                widen_main(raw, factors, kv)
                        T.copy(kv, kv_nz[:HALF, :])
                        T.copy(kv_nz[:HALF, :], kv_l1[sid * HALF : sid * HALF + HALF, :])
                        for k in T.serial(D // 128):
                            T.copy(q_l1[:, k * 128 : k * 128 + 128], q_a)
                            T.copy(kv_l1[:, k * 128 : k * 128 + 128], k_b)
                            T.gemm(q_a, k_b, s_c, transpose_B=True, clear_accum=(k == 0))
                        T.dual_copy(s_c, scores)
                        with T.SimdVF():
                            softmax_step(half, places, scores, scale, top, total, shrink, weights)
                        T.copy(weights, weights_nz[:half, :])
                        T.dual_copy(weights_nz[:half, :], p_l1)
                        T.copy(p_l1, p_a)
                        for v in T.serial(D // 256):
                            T.copy(kv_l1[:, v * 256 : v * 256 + 256], v_b)
                            T.gemm(p_a, v_b, o_c, transpose_B=False, clear_accum=True)
                            T.dual_copy(o_c, part)
                            with T.SimdVF():
                                for h in T.serial(T.uint16(half)):
                                    less = S.vld(shrink[h], dist="BRC_B32")
                                    for c in T.serial(T.uint16(4)):
                                        kept = S.vmul(S.vld(summed[h, v * 256 + c * 64]), less)
                                        S.vsts(summed[h, v * 256 + c * 64], S.vadd(kept, S.vld(part[h, c * 64])))
                with T.SimdVF():
                    finish(half, summed, top, total, sinks, turn, result)
                T.dual_copy(result, out[t, :, :])

    return latent_attention
