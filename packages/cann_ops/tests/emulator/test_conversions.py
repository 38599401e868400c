"""Conversions: every code of the small formats, and floats against torch's rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

# (source type, its loads, target type, its stores, controls): 64 source lanes of 32 bits, or 128 of 16.
SOURCE = """
#include "c_api/asc_simd.h"
#define CONVERT(name, S, D, mask, ...)                                          \\
  __simd_vf__ inline void name(__ubuf__ uint8_t* ub) {                          \\
    asc_host::VReg<S> a; asc_host::VReg<D> r;                                   \\
    asc_loadalign(a, (__ubuf__ S*)ub);                                          \\
    vcvt(r, a, asc_create_mask_##mask(PAT_ALL), __VA_ARGS__, MODE_ZEROING);     \\
    asc_storealign((__ubuf__ uint8_t*)(ub + 256), (vector_u8&)r, 0, asc_create_mask_b8(PAT_ALL)); \\
  }
CONVERT(to_bf16, float, bfloat16_t, b16, ROUND_R, RS_ENABLE, PART_EVEN)
CONVERT(to_bf16_odd, float, bfloat16_t, b16, ROUND_R, RS_ENABLE, PART_ODD)
CONVERT(to_bf16_zero, float, bfloat16_t, b16, ROUND_Z, RS_ENABLE, PART_EVEN)
CONVERT(to_half, float, half, b16, ROUND_R, RS_ENABLE, PART_EVEN)
CONVERT(to_e4m3, float, float8_e4m3_t, b8, ROUND_R, RS_ENABLE, PART_P0)
CONVERT(to_e4m3_last, float, float8_e4m3_t, b8, ROUND_R, RS_ENABLE, PART_P3)
CONVERT(to_e4m3_nan, float, float8_e4m3_t, b8, ROUND_R, RS_DISABLE, PART_P0)
CONVERT(to_e5m2, float, float8_e5m2_t, b8, ROUND_R, RS_ENABLE, PART_P0)
CONVERT(to_int, float, int32_t, b32, ROUND_R, RS_ENABLE)
CONVERT(to_int_floor, float, int32_t, b32, ROUND_F, RS_ENABLE)
CONVERT(to_int_ceil, float, int32_t, b32, ROUND_C, RS_ENABLE)
CONVERT(to_int_away, float, int32_t, b32, ROUND_A, RS_ENABLE)
CONVERT(to_int_zero, float, int32_t, b32, ROUND_Z, RS_ENABLE)
CONVERT(from_bf16, bfloat16_t, float, b16, PART_EVEN)
CONVERT(from_bf16_odd, bfloat16_t, float, b16, PART_ODD)
CONVERT(from_e4m3, float8_e4m3_t, float, b8, PART_P1)
CONVERT(from_e5m2, float8_e5m2_t, float, b8, PART_P2)
CONVERT(from_int, int32_t, float, b32, ROUND_R)
CONVERT(narrow, int32_t, int16_t, b16, RS_ENABLE, PART_EVEN)
CONVERT(narrow_wrap, int32_t, int16_t, b16, RS_DISABLE, PART_EVEN)
CONVERT(to_fp4, bfloat16_t, float4_e2m1x2_t, b8, ROUND_R, PART_P1)
CONVERT(from_fp4, float4_e2m1x2_t, bfloat16_t, b8, PART_P2)
#define CASE(i, name) if (which == i) name(ub);
extern "C" __global__ __vector__ void convert(__gm__ uint8_t* x, __gm__ uint8_t* y, int32_t n, int32_t which) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  for (int32_t i = 0; i < n; ++i) {
    asc_copy_gm2ub_align(ub, x + 256 * i, 1, 256, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 256, 256);
    asc_sync();
    CASES
    asc_sync();
    asc_copy_ub2gm_align(y + 256 * i, ub + 256, 1, 256, static_cast<asc_store_l2_cache_mode>(0), 256, 256);
    asc_sync();
  }
}
"""
NAMES = [line.split("(")[1].split(",")[0] for line in SOURCE.splitlines() if line.startswith("CONVERT(")]
TEXT = SOURCE.replace("CASES", " ".join(f"CASE({i}, {name})" for i, name in enumerate(NAMES)))


@pytest.fixture(scope="module")
def convert(program):
    """Bytes of whole registers through a conversion."""

    def call(name, values):
        data = values.contiguous().view(torch.uint8).reshape(-1)
        assert data.numel() % 256 == 0
        out = torch.zeros_like(data)
        given = {"x": data, "y": out, "n": data.numel() // 256, "which": NAMES.index(name)}
        report = program(TEXT).run(given, cores=1, undefined=["y"])
        assert report.defined["y"].all()
        return out

    return call


def lanes(out, dtype, step, part=0):
    """Every `step`-th lane; the others are zero."""
    rows = out.view(dtype).reshape(-1, step)
    others = torch.ones(step, dtype=torch.bool)
    others[part] = False
    assert not rows.view(torch.uint8).reshape(len(rows), step, -1)[:, others].any()
    return rows[:, part].contiguous()


def same(got, expected):
    """Equal bits, or both NaN."""
    both_nan = got.float().isnan() & expected.float().isnan()
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return bool(((got.view(size) == expected.view(size)) | both_nan).all())


EDGES = [0.0, -0.0, 1.0, 0.5, 1.5, 2.5, -2.5, 447.9, 448.0, 464.0, 465.0, 480.0, 57344.0, 6e4, 65504.0, 65520.0, 1e30,
         -1e30, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 2.0**-16, 2.0**-17, 1e-40, 2147483520.0, 2147483648.0, -2147483648.0,
         -3e9, float("inf"), float("-inf")]  # fmt: skip


def padded(values):
    out = np.zeros(-(-len(values) // 64) * 64, np.float32)
    out[: len(values)] = values
    return torch.from_numpy(out)


def check_floats(convert, x):
    assert same(lanes(convert("to_bf16", x), torch.bfloat16, 2), x.bfloat16())
    assert same(lanes(convert("to_bf16_odd", x), torch.bfloat16, 2, 1), x.bfloat16())
    zero = (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert same(lanes(convert("to_bf16_zero", x), torch.bfloat16, 2), zero)
    assert same(lanes(convert("to_half", x), torch.float16, 2), x.half())
    saturated = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert same(lanes(convert("to_e4m3", x), torch.float8_e4m3fn, 4), saturated)
    assert same(lanes(convert("to_e4m3_last", x), torch.float8_e4m3fn, 4, 3), saturated)
    assert same(lanes(convert("to_e4m3_nan", x), torch.float8_e4m3fn, 4)[x.abs() <= 448], saturated[x.abs() <= 448])
    assert same(lanes(convert("to_e5m2", x), torch.float8_e5m2, 4), x.clamp(-57344, 57344).to(torch.float8_e5m2))
    for name, how in (("to_int", torch.round), ("to_int_floor", torch.floor), ("to_int_ceil", torch.ceil),
                      ("to_int_zero", torch.trunc)):  # fmt: skip
        expected = how(x.double()).clamp(-(2.0**31), 2.0**31 - 1).int()
        assert torch.equal(convert(name, x).view(torch.int32), expected), name
    away = (torch.sign(x.double()) * torch.floor(x.double().abs() + 0.5)).clamp(-(2.0**31), 2.0**31 - 1).int()
    assert torch.equal(convert("to_int_away", x).view(torch.int32), away)


def test_edges_of_the_formats(convert):
    check_floats(convert, padded(EDGES))


@settings(max_examples=25, deadline=None)
@given(arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False)))
def test_floats_round_as_torch_rounds(convert, x):
    check_floats(convert, torch.from_numpy(x))


def test_not_a_number_stays_one(convert):
    x = torch.full((64,), torch.nan)
    for name, dtype, step in (("to_bf16", torch.bfloat16, 2), ("to_half", torch.float16, 2),
                              ("to_e4m3", torch.float8_e4m3fn, 4), ("to_e5m2", torch.float8_e5m2, 4)):  # fmt: skip
        assert lanes(convert(name, x), dtype, step).float().isnan().all(), name
    over = torch.full((64,), 1000.0)
    assert lanes(convert("to_e4m3_nan", over), torch.float8_e4m3fn, 4).float().isnan().all()


def test_every_code_of_fp8_and_bfloat16_is_read(convert):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for name, dtype, part in (("from_e4m3", torch.float8_e4m3fn, 1), ("from_e5m2", torch.float8_e5m2, 2)):
        spread = torch.zeros(256, 4, dtype=torch.uint8)
        spread[:, part] = codes
        assert same(convert(name, spread).view(torch.float32), codes.view(dtype).float())
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert same(convert("from_bf16", words).view(torch.float32), words.float()[::2].contiguous())
    assert same(convert("from_bf16_odd", words).view(torch.float32), words.float()[1::2].contiguous())


def test_fp4_goes_to_the_nearest_and_back(convert):
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.zeros(256, 4, dtype=torch.uint8)
    codes[:, 2] = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = convert("from_fp4", codes).view(torch.bfloat16)
    pairs = torch.arange(256)
    assert same(got, torch.stack([table[pairs % 16], table[pairs // 16]], 1).reshape(-1).bfloat16())
    values = torch.cat([table, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 100.0, -0.25, -5.0, 0.26])])
    x = torch.zeros(128)
    x[: len(values)] = values
    out = lanes(convert("to_fp4", x.bfloat16()), torch.uint8, 4, 1)
    back = torch.stack([table[(out & 15).long()], table[(out >> 4).long()]], 1).reshape(-1)[: len(values)]
    ties = torch.tensor([0.0, 1, 1, 2, 2, 4, 4, 6, 6, -0.0, -4, 0.5])  # to the even code
    assert torch.equal(back, torch.cat([table, ties]))


def test_integers_saturate_or_wrap(convert):
    x = torch.tensor([0, 1, -1, 32767, 32768, -32768, -32769, 2**31 - 1, -(2**31), 65536 + 5], dtype=torch.int32)
    x = torch.cat([x, torch.zeros(54, dtype=torch.int32)])
    assert torch.equal(lanes(convert("narrow", x), torch.int16, 2), x.clamp(-32768, 32767).short())
    assert torch.equal(lanes(convert("narrow_wrap", x), torch.int16, 2), x.short())
    assert torch.equal(convert("from_int", x).view(torch.float32), x.float())
