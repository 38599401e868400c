"""Lane-wise register operations one by one against numpy: full and partial masks, every width of a lane."""

from __future__ import annotations

import numpy as np
import pytest
import torch

ARITHMETIC = {
    "add": ("asc_add(r, a, b, m);", lambda a, b: a + b),
    "sub": ("asc_sub(r, a, b, m);", lambda a, b: a - b),
    "mul": ("asc_mul(r, a, b, m);", lambda a, b: a * b),
    "max": ("asc_max(r, a, b, m);", np.maximum),
    "min": ("asc_min(r, a, b, m);", np.minimum),
    "add_scalar": ("asc_add_scalar(r, a, 3, m);", lambda a, b: a + a.dtype.type(3)),
    "mul_scalar": ("asc_mul_scalar(r, a, 3, m);", lambda a, b: a * a.dtype.type(3)),
    "max_scalar": ("asc_max_scalar(r, a, 3, m);", lambda a, b: np.maximum(a, a.dtype.type(3))),
    "min_scalar": ("asc_min_scalar(r, a, 3, m);", lambda a, b: np.minimum(a, a.dtype.type(3))),
    "abs_sub": ("asc_abs_sub(r, a, b, m);", lambda a, b: np.where(a > b, a - b, b - a)),
    "duplicate_scalar": ("asc_duplicate_scalar(r, 5, m);", lambda a, b: np.full_like(a, 5)),
    "duplicate": ("asc_duplicate(r, a, m);", lambda a, b: np.full_like(a, a[0])),
    "duplicate_highest": ("asc_duplicate_highest(r, a, m);", lambda a, b: np.full_like(a, a[-1])),
    "madd": ("r = a; asc_madd(r, b, a, m);", lambda a, b: a * b + a),
    "vmula": ("r = a; vmula(r, a, b, m, MODE_ZEROING);", lambda a, b: a + a * b),
    "axpy": ("r = b; asc_axpy(r, a, 2, m);", lambda a, b: b + a * a.dtype.type(2)),
    "and": ("asc_and(r, a, b, m);", lambda a, b: bits(bits_of(a) & bits_of(b), a)),
    "or": ("asc_or(r, a, b, m);", lambda a, b: bits(bits_of(a) | bits_of(b), a)),
    "xor": ("asc_xor(r, a, b, m);", lambda a, b: bits(bits_of(a) ^ bits_of(b), a)),
    "not": ("asc_not(r, a, m);", lambda a, b: bits(~bits_of(a), a)),
    "arange": ("asc_arange(r, T(2));", None),
}
SIGNED = {
    "abs": ("asc_abs(r, a, m);", lambda a, b: np.abs(a)),
    "neg": ("asc_neg(r, a, m);", lambda a, b: -a),
    "relu": ("asc_relu(r, a, m);", lambda a, b: np.maximum(a, 0)),
    "prelu": ("asc_prelu(r, a, b, m);", lambda a, b: np.where(a > 0, a, a * b)),
    "leakyrelu": ("asc_leakyrelu(r, a, 2, m);", lambda a, b: np.where(a > 0, a, a * a.dtype.type(2))),
}
FLOATS = {
    "div": ("asc_div(r, a, b, m);", lambda a, b: a / b),
    "exp": ("asc_exp(r, a, m);", lambda a, b: np.exp(a.astype(np.float32))),
    "ln": ("asc_abs(r, a, m); asc_ln(r, r, m);", lambda a, b: np.log(np.abs(a).astype(np.float32))),
    "sqrt": ("asc_abs(r, a, m); asc_sqrt(r, r, m);", lambda a, b: np.sqrt(np.abs(a).astype(np.float32))),
    "exp_sub": ("asc_exp_sub(r, a, b, m);", lambda a, b: np.exp(a.astype(np.float32) - b.astype(np.float32))),
}
INTS = {
    "shiftleft": ("asc_shiftleft_scalar(r, a, 3, m);", lambda a, b: a << 3),
    "shiftright": ("asc_shiftright_scalar(r, a, 2, m);", lambda a, b: a >> 2),
    "shift_by_all": ("asc_shiftleft_scalar(r, a, 64, m);", lambda a, b: np.zeros_like(a)),
    "shift_by_lane": (
        "auto n = a; asc_arange(n, T(0)); asc_and(n, n, asc_host::filled(T(7)), all); asc_shiftright(r, a, n, m);",
        lambda a, b: a >> (np.arange(a.size) & 7).astype(a.dtype),
    ),
    "div": (
        "auto d = b; asc_or(d, d, asc_host::filled(T(1)), all); asc_div(r, a, d, m);",
        lambda a, b: (np.trunc(a.astype(np.float64) / (b | a.dtype.type(1)).astype(np.float64))).astype(a.dtype),
    ),
}
MERGED = {
    "vadd": ("r = b; vadd(r, a, b, m, MODE_MERGING);", lambda a, b: a + b),
    "vmuls": ("r = b; vmuls(r, a, 3, m, MODE_MERGING);", lambda a, b: a * a.dtype.type(3)),
    "vmax": ("r = b; vmax(r, a, b, m, MODE_MERGING);", np.maximum),
    "vdup": ("r = b; vdup(r, T(4), m, MODE_MERGING);", lambda a, b: np.full_like(a, 4)),
    "vdupv": ("r = b; vdup(r, a, m, POS_HIGHEST, MODE_MERGING);", lambda a, b: np.full_like(a, a[-1])),
    "vmula": ("r = b; vmula(r, a, a, m, MODE_MERGING);", lambda a, b: b + a * a),
    "select": ("asc_select(r, a, b, m);", lambda a, b: a),
}
TYPES = {
    "float": np.float32, "half": np.float16, "int32_t": np.int32, "uint16_t": np.uint16, "int8_t": np.int8,
}  # fmt: skip


def bits_of(a):
    return a.view(f"u{a.itemsize}")


def bits(u, like):
    return u.view(like.dtype)


def cases(name):
    dtype = np.dtype(TYPES[name])
    out = dict(ARITHMETIC)
    if dtype.kind in "fi":
        out |= SIGNED
    return out | (FLOATS if dtype.kind == "f" else INTS)


def source(name):
    """One SIMD function a case; the kernel calls the one that is asked for on two registers and stores the result."""
    width = np.dtype(TYPES[name]).itemsize * 8
    functions, calls = [], []
    codes = [code for code, _ in cases(name).values()] + [code for code, _ in MERGED.values()]
    for i, code in enumerate(codes):
        functions.append(f"""
__simd_vf__ inline void case_{i}(__ubuf__ uint8_t* ub, int32_t lanes) {{
  using T = {name};
  asc_host::VReg<T> a, b, r;
  asc_loadalign(a, (__ubuf__ T*)ub);
  asc_loadalign(b, (__ubuf__ T*)(ub + 256));
  uint32_t count = lanes;
  vector_bool m = asc_update_mask_b{width}(count), all = asc_create_mask_b{width}(PAT_ALL);
  {code}
  asc_storealign((__ubuf__ T*)(ub + 512), r, 0, all);
}}""")
        calls.append(f"  if (which == {i}) case_{i}(ub, lanes);")
    body = "\n".join(calls)
    return f"""
#include "c_api/asc_simd.h"
{"".join(functions)}
extern "C" __global__ __vector__ void lanes(__gm__ uint8_t* out, __gm__ uint8_t* x, int32_t lanes, int32_t which) {{
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, x, 1, 512, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 512, 512);
  asc_sync();
{body}
  asc_sync();
  asc_copy_ub2gm_align(out, ub + 512, 1, 256, static_cast<asc_store_l2_cache_mode>(0), 256, 256);
}}
"""


def registers(dtype, seed):
    """Two registers: small numbers of both signs, and the ends of the type."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    n = 256 // dtype.itemsize
    if dtype.kind == "f":
        a, b = (rng.standard_normal(n).astype(dtype) for _ in range(2))
        a[:3], b[:3] = (0, -0.0, 2), (1, 1, -0.5)
        return a, b
    info = np.iinfo(dtype)
    a, b = (rng.integers(info.min, info.max, n, dtype, endpoint=True) for _ in range(2))
    a[:3], b[:3] = (info.min, info.max, 0), (1, info.max, info.max)
    return a, b


def call(program, name, index, lanes, seed=0):
    a, b = registers(TYPES[name], seed)
    out = torch.zeros(256, dtype=torch.uint8)
    x = torch.from_numpy(np.concatenate([a.view(np.uint8), b.view(np.uint8)]))
    report = program(source(name)).run({"x": x, "out": out, "which": index, "lanes": lanes}, cores=1, undefined=["out"])
    assert report.defined["out"].all()
    return a, b, out.numpy().view(a.dtype)


@pytest.mark.parametrize("name", TYPES)
def test_lanes_that_are_on_hold_the_result_and_others_zero(program, name):
    n = 256 // np.dtype(TYPES[name]).itemsize
    for index, (case, (_, reference)) in enumerate(cases(name).items()):
        for lanes in (0, 1, n // 2 - 1, n):
            a, b, got = call(program, name, index, lanes)
            if reference is None:  # not masked
                assert np.array_equal(got, np.arange(2, n + 2).astype(a.dtype)), case
                continue
            with np.errstate(all="ignore"):
                expected = np.asarray(reference(a, b))
            on = np.arange(n) < lanes
            if case in ("exp", "ln", "exp_sub"):
                np.testing.assert_allclose(got[on], expected[on], rtol=2e-7 if a.itemsize == 4 else 1e-3, err_msg=case)
            elif case in ("vmula", "madd", "axpy", "prelu") and a.dtype.kind == "f":  # rounded once here, twice there
                np.testing.assert_allclose(got[on], expected[on], rtol=0.01 if a.itemsize == 2 else 1e-5, atol=1e-3)
            else:
                expected = expected.astype(a.dtype)
                same = (got == expected) | (bits_of(got) == bits_of(expected))
                assert same[on].all(), (case, lanes)
            assert not got[~on].any(), (case, lanes)


@pytest.mark.parametrize("name", TYPES)
def test_merging_keeps_lanes_that_are_off(program, name):
    n, first = 256 // np.dtype(TYPES[name]).itemsize, len(cases(name))
    for index, (case, (_, reference)) in enumerate(MERGED.items()):
        for lanes in (0, 1, n - 1, n):
            a, b, got = call(program, name, first + index, lanes, seed=1)
            with np.errstate(all="ignore"):
                expected = np.where(np.arange(n) < lanes, reference(a, b), b).astype(a.dtype)
            if case == "vmula" and a.dtype.kind == "f":
                np.testing.assert_allclose(got, expected, rtol=0.01 if a.itemsize == 2 else 1e-5, atol=1e-3)
            else:
                assert np.array_equal(got, expected), (case, lanes)
