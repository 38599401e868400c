"""What moves, reduces, compares and converts within registers, against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

LANES = 64


def permute(a, b, m):
    inter = np.stack([a, b], 1).reshape(-1)
    both = np.concatenate([a, b])
    return {
        "asc_intlv(r, s, a, b);": (inter[:64], inter[64:]),
        "asc_deintlv(r, s, a, b);": (both[::2], both[1::2]),
        "asc_squeeze(r, a, m);": (np.concatenate([a[m], np.zeros(64 - m.sum(), a.dtype)]), None),
        "asc_duplicate_scalar(r, 0, all); asc_unsqueeze(r, m);": (np.cumsum(m) - m, None),
        "asc_gather(r, a, reverse);": (a[::-1], None),
        "asc_reduce_sum(r, a, m);": (first(a[m].sum(dtype=np.uint32)), None),
        "asc_reduce_max(r, a, m);": (first(a[m].max(initial=0), a_index(a, m, np.argmax)), None),
        "asc_reduce_min(r, a, m);": (first(a[m].min(initial=2**32 - 1), a_index(a, m, np.argmin)), None),
        "asc_reduce_max_datablock(r, a, m);": (first(*(np.where(m, a, 0).reshape(8, 8).max(1))), None),
        "asc_reduce_min_datablock(r, a, m);": (first(*(np.where(m, a, 2**32 - 1).reshape(8, 8).min(1))), None),
        "asc_reduce_sum_datablock(r, a, m);": (first(*np.where(m, a, 0).reshape(8, 8).sum(1, dtype=np.uint32)), None),
        "asc_pair_reduce_sum(r, a, m);": (first(*np.where(m, a, 0).reshape(32, 2).sum(1, dtype=np.uint32)), None),
        "asc_mull(r, s, a, b, m);": (
            np.where(m, a.astype(np.uint64) * b, 0) & 0xFFFFFFFF, np.where(m, a.astype(np.uint64) * b, 0) >> 32,
        ),
        "vector_bool c; asc_add(c, r, a, b, m); store_mask(s, c);": (
            np.where(m, a + b, 0), m & (a.astype(np.uint64) + b >= 2**32),
        ),
        "vector_bool c; asc_sub(c, r, a, b, m); store_mask(s, c);": (np.where(m, a - b, 0), m & (a >= b)),
        "vector_bool c, k; asc_gt(k, a, b, all); asc_addc(c, r, a, b, k, all); store_mask(s, c);": (
            a + b + (a > b), a.astype(np.uint64) + b + (a > b) >= 2**32,
        ),
        "vector_bool c, k; asc_gt(k, a, b, all); asc_subc(c, r, a, b, k, all); store_mask(s, c);": (
            a - b - 1 + (a > b), a.astype(np.int64) - b - 1 + (a > b) >= 0,
        ),
        "vector_u16 h; asc_pack_to_low(h, a); r = (vector_u32&)h;": (halves(a & 0xFFFF, 0), None),
        "vector_u16 h; asc_pack_to_high(h, a); r = (vector_u32&)h;": (halves(a & 0xFFFF, 1), None),
        "asc_unpack_lower(r, (vector_u16&)a);": (a.view(np.uint16)[:64], None),
        "asc_unpack_upper(r, (vector_u16&)a);": (a.view(np.uint16)[64:], None),
    }  # fmt: skip


def first(*values):
    out = np.zeros(LANES, np.uint32)
    out[: len(values)] = values
    return out


def a_index(a, m, pick):
    where = np.flatnonzero(m)
    return where[pick(a[m])] if len(where) else 0


def halves(values, part):
    out = np.zeros(128, np.uint16)
    out[64 * part : 64 * part + 64] = values
    return out.view(np.uint32)


def compare(a, b, m):
    s = a.astype(np.int64)
    table = {
        f"vector_bool c; asc_{op}(c, a, b, m); store_mask(r, c);": (m & f(a, b), None)
        for op, f in zip(("eq", "ne", "gt", "ge", "lt", "le"), (np.equal, np.not_equal, np.greater, np.greater_equal,
                                                                  np.less, np.less_equal), strict=True)
    }  # fmt: skip
    table |= {
        "vector_bool c; asc_lt_scalar(c, a, 1000u, m); store_mask(r, c);": (m & (s < 1000), None),
        "vector_bool c, d; asc_lt(c, a, b, all); asc_not(d, c, m); store_mask(r, d);": (m & ~(a < b), None),
        "vector_bool c, d; asc_lt(c, a, b, all); asc_and(d, c, m, all); store_mask(r, d);": (m & (a < b), None),
        "vector_bool c, d; asc_lt(c, a, b, all); asc_or(d, c, m, all); store_mask(r, d);": (m | (a < b), None),
        "vector_bool c, d; asc_lt(c, a, b, all); asc_xor(d, c, m, all); store_mask(r, d);": (m ^ (a < b), None),
        "vector_bool c, d; asc_lt(c, a, b, all); asc_select(d, c, m, m); store_mask(r, d);": (m & (a < b), None),
        "vector_bool c, d; asc_lt(c, a, b, all); asc_intlv_b32(c, d, c, m); store_mask(r, c); store_mask(s, d);": (
            np.stack([a < b, m], 1).reshape(-1)[:64], np.stack([a < b, m], 1).reshape(-1)[64:],
        ),
        "vector_bool c, d; asc_lt(c, a, b, all); asc_deintlv_b32(c, d, c, m); store_mask(r, c); store_mask(s, d);": (
            np.concatenate([a < b, m])[::2], np.concatenate([a < b, m])[1::2],
        ),
        "vector_bool c, d; asc_pack_to_low(c, m); asc_unpack_lower(d, c); store_mask(r, d);": (m, None),
        "vector_bool c, d; asc_pack_to_high(c, m); asc_unpack_upper(d, c); store_mask(r, d);": (m, None),
    }  # fmt: skip
    patterns = {"ALL": m | True, "ALLF": m & False, "H": np.arange(64) < 32, "Q": np.arange(64) < 16,
                "M3": np.arange(64) % 3 == 0, "M4": np.arange(64) % 4 == 0, "VL1": np.arange(64) < 1,
                "VL8": np.arange(64) < 8}  # fmt: skip
    table |= {f"store_mask(r, asc_create_mask_b32(PAT_{p}));": (on, None) for p, on in patterns.items()}
    return table


def source(codes):
    functions, calls = [], []
    for i, code in enumerate(codes):
        functions.append(f"""
__simd_vf__ inline void case_{i}(__ubuf__ uint8_t* ub, int32_t lanes) {{
  vector_u32 a, b, r, s = vector_u32::zeros(), reverse;
  asc_loadalign(a, (__ubuf__ uint32_t*)ub);
  asc_loadalign(b, (__ubuf__ uint32_t*)(ub + 256));
  asc_arange_descend(reverse, 63);
  uint32_t count = lanes;
  vector_bool m = asc_update_mask_b32(count), all = asc_create_mask_b32(PAT_ALL);
  {code}
  asc_storealign((__ubuf__ uint32_t*)(ub + 512), r, 0, all);
  asc_storealign((__ubuf__ uint32_t*)(ub + 768), s, 0, all);
}}""")
        calls.append(f"  if (which == {i}) case_{i}(ub, lanes);")
    body = "\n".join(calls)
    return f"""
#include "c_api/asc_simd.h"
inline void store_mask(vector_u32& d, vector_bool m) {{
  asc_select(d, asc_host::filled(1u), asc_host::filled(0u), m);
}}
{"".join(functions)}
extern "C" __global__ __vector__ void registers(__gm__ uint8_t* out, __gm__ uint8_t* x, int32_t lanes, int32_t which) {{
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, x, 1, 512, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 512, 512);
  asc_sync();
{body}
  asc_sync();
  asc_copy_ub2gm_align(out, ub + 512, 1, 512, static_cast<asc_store_l2_cache_mode>(0), 512, 512);
}}
"""


@pytest.mark.parametrize("table", [permute, compare])
@pytest.mark.parametrize("lanes", [0, 1, 5, 63, 64])
def test_each_operation_is_numpys(program, table, lanes):
    rng = np.random.default_rng(lanes)
    a, b = (rng.integers(0, 2**32, LANES, np.uint32) for _ in range(2))
    b[:4] = a[:4]  # equal ones
    a[7] = a[9] = a.max()  # the first of equal ones counts
    m = np.arange(LANES) < lanes
    expected = table(a, b, m)
    ready = program(source(tuple(expected)))
    for index, (code, (low, high)) in enumerate(expected.items()):
        out = torch.zeros(512, dtype=torch.uint8)
        x = torch.from_numpy(np.concatenate([a, b]).view(np.uint8))
        ready.run({"x": x, "out": out, "which": index, "lanes": lanes}, cores=1, undefined=["out"])
        got = out.numpy().view(np.uint32).reshape(2, LANES)
        assert np.array_equal(got[0], np.asarray(low).astype(np.uint32)), (code, lanes)
        if high is not None:
            assert np.array_equal(got[1], np.asarray(high).astype(np.uint32)), (code, lanes)


def test_histograms_count_bytes(program):
    text = """
#include "c_api/asc_simd.h"
__simd_vf__ inline void count(__ubuf__ uint8_t* ub, int32_t n) {
  vector_u8 x;
  asc_loadalign(x, ub);
  uint32_t lanes = n;
  vector_bool m = asc_update_mask_b8(lanes), all = asc_create_mask_b16(PAT_ALL);
  vector_u16 h[4];
  for (auto& one : h) asc_duplicate_scalar(one, 10, all);
  asc_frequency_histogram_bin0(h[0], x, m);
  asc_frequency_histogram_bin1(h[1], x, m);
  asc_cumulative_histogram_bin0(h[2], x, m);
  asc_cumulative_histogram_bin1(h[3], x, m);
  for (int i = 0; i < 4; ++i) asc_storealign((__ubuf__ uint16_t*)(ub + 256 + 256 * i), h[i], 0, all);
}
extern "C" __global__ __vector__ void histogram(__gm__ uint8_t* x, __gm__ uint8_t* y, int32_t n) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, x, 1, 256, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 256, 256);
  asc_sync();
  count(ub, n);
  asc_sync();
  asc_copy_ub2gm_align(y, ub + 256, 1, 1024, static_cast<asc_store_l2_cache_mode>(0), 1024, 1024);
}
"""
    x = torch.randint(0, 256, (256,), dtype=torch.uint8)
    x[:100] = 200
    for n in (0, 1, 255, 256):
        y = torch.zeros(1024, dtype=torch.uint8)
        program(text).run({"x": x, "y": y, "n": n}, cores=1, undefined=["y"])
        counts = torch.bincount(x[:n].long(), minlength=256)
        expected = torch.cat([counts, counts.cumsum(0)]) + 10
        assert torch.equal(y.view(torch.int16).long(), expected)
