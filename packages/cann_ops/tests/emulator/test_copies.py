"""Copies between global memory, UB and L1, with strides, padding, layouts and atomic stores, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_ops import emulate

SOURCE = """
#include "c_api/asc_simd.h"
// UB is filled with 7 first; then the copy; then all of it goes out.
__simd_vf__ inline void fill(__ubuf__ uint8_t* ub) {
  vector_bool all = asc_create_mask_b8(PAT_ALL);
  vector_u8 seven;
  asc_duplicate_scalar(seven, 7, all);
  for (int i = 0; i < 16; ++i) asc_storealign(ub, seven, 256 * i, all);
}
extern "C" __global__ __vector__ void bursts(__gm__ uint8_t* x, __gm__ uint8_t* y, int32_t count, int32_t bytes,
    int32_t left, int32_t right, int32_t pad, int32_t gm_step, int32_t ub_step, int32_t wide) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  auto load = static_cast<asc_load_l2_cache_mode>(0);
  fill(ub);
  asc_sync();
  asc_set_copy_pad_val((uint16_t)0x0102);
  if (wide) {
    asc_copy_gm2ub_align((__ubuf__ uint16_t*)ub, (__gm__ uint16_t*)x, count, bytes, left, right, pad, load, gm_step,
                         ub_step);
  } else {
    asc_copy_gm2ub_align(ub, x, count, bytes, left, right, pad, load, gm_step, ub_step);
  }
  asc_sync();
  asc_copy_ub2gm_align(y, ub, 1, 4096, static_cast<asc_store_l2_cache_mode>(0), 4096, 4096);
}
extern "C" __global__ __vector__ void out(__gm__ uint8_t* x, __gm__ uint8_t* y, int32_t count, int32_t bytes,
    int32_t gm_step, int32_t ub_step) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, x, 1, 4096, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 4096, 4096);
  asc_sync();
  asc_copy_ub2gm_align(y, ub, count, bytes, static_cast<asc_store_l2_cache_mode>(0), gm_step, ub_step);
}
extern "C" __global__ __vector__ void atomics(__gm__ uint8_t* x, __gm__ uint8_t* y, int32_t op, int32_t bytes) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, x, 1, bytes, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), bytes, bytes);
  asc_sync();
  if (op == 0) asc_set_atomic_add_float();
  if (op == 1) asc_set_atomic_max_float();
  if (op == 2) asc_set_atomic_min_float16();
  if (op == 3) asc_set_atomic_add_bfloat();
  if (op == 4) asc_set_atomic_add_int32();
  if (op == 5) asc_set_atomic_max_int16();
  if (op == 6) asc_set_atomic_add_int8();
  asc_copy_ub2gm_align(y, ub, 1, bytes, static_cast<asc_store_l2_cache_mode>(0), bytes, bytes);
  if (op != 7) asc_set_atomic_none();
  if (op == 7) asc_set_atomic_add_float();
}
"""


def bursts(program, x, **options):
    given_ = {"left": 0, "right": 0, "pad": 0, "wide": 0} | options
    y = torch.zeros(4096, dtype=torch.uint8)
    report = program(SOURCE).run({"x": x, "y": y} | given_, cores=1, kernel="bursts", undefined=["y"])
    return y.numpy(), report.defined["y"]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 5),
    bytes=st.integers(0, 70),
    gap=st.integers(0, 9),
    blocks=st.integers(0, 2),
)
def test_bursts_with_steps(program, count, bytes, gap, blocks):
    """A burst fills its last block of 32 bytes: these bytes are undefined, those behind them untouched."""
    x = torch.randint(0, 256, (max(1, count * (bytes + gap)),), dtype=torch.uint8)
    whole = -(-bytes // 32) * 32
    step = whole + 32 * blocks
    got, known = bursts(program, x, count=count, bytes=bytes, gm_step=bytes + gap, ub_step=step)
    expected = np.full(4096, 7, np.uint8)
    defined = np.ones(4096, bool)
    for i in range(count if bytes else 0):
        row = x.numpy()[i * (bytes + gap) : i * (bytes + gap) + bytes]
        expected[i * step : i * step + bytes] = row
        defined[i * step + bytes : i * step + whole] = False
    assert np.array_equal(known, defined)
    assert np.array_equal(got[defined], expected[defined])
    assert (got[~defined] == 0xFF).all()


def test_rows_closer_than_a_block_follow_each_other(program):
    x = torch.arange(60, dtype=torch.int32).to(torch.uint8)
    got, known = bursts(program, x, count=5, bytes=12, gm_step=12, ub_step=12)
    assert np.array_equal(got[:60], x.numpy()) and (got[60:] == 7).all() and known.all()


@pytest.mark.parametrize("pad", [0, 1])
def test_padding(program, pad):
    x = torch.arange(1, 41, dtype=torch.int32).to(torch.uint8)
    got, known = bursts(program, x, count=2, bytes=20, left=1, right=2, pad=pad, gm_step=20, ub_step=64, wide=1)
    for i in range(2):
        row = x.numpy()[20 * i : 20 * i + 20]
        filler = np.array([2, 1] if pad else row[:2], np.uint8)
        block = got[64 * i : 64 * i + 64]
        assert np.array_equal(block[:26], np.concatenate([filler, row, filler, filler]))
        if pad:
            assert np.array_equal(block[26:32], np.tile(filler, 3)) and known[64 * i : 64 * i + 32].all()
        else:
            assert not known[64 * i + 26 : 64 * i + 32].any()
        assert (block[32:] == 7).all()


@settings(max_examples=25, deadline=None)
@given(count=st.integers(0, 4), bytes=st.integers(0, 100), gap=st.integers(0, 40))
def test_bursts_out_of_ub(program, count, bytes, gap):
    x = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    y = torch.full((max(1, count * (bytes + gap)),), 9, dtype=torch.uint8)
    given_ = {"x": x, "y": y, "count": count, "bytes": bytes, "gm_step": bytes + gap, "ub_step": 128}
    report = program(SOURCE).run(given_, cores=1, kernel="out")
    expected = np.full(len(y), 9, np.uint8)
    for i in range(count):
        expected[i * (bytes + gap) : i * (bytes + gap) + bytes] = x.numpy()[128 * i : 128 * i + bytes]
    assert np.array_equal(y.numpy(), expected)
    assert report.written_bytes == count * bytes


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"count": 4096}, emulate.InstructionError, "bursts: got 4096, allowed are 0 to 4095"),
        ({"bytes": 1 << 21}, emulate.InstructionError, "bytes of a burst: got 2097152"),
        ({"left": 33}, emulate.InstructionError, "padding on the left: got 33"),
        ({"count": 3}, emulate.BoundsError, r"reads tensor x bytes \[64, 96\), allowed is \[0, 64\)"),
        ({"gm_step": -32}, emulate.BoundsError, r"reads tensor x bytes \[-32, 0\)"),
        ({"ub_step": 1 << 18}, emulate.BoundsError, r"writes UB bytes \[262144"),
    ],
)
def test_wrong_bursts_are_found(program, options, kind, text):
    x = torch.zeros(64, dtype=torch.uint8)
    base = {"count": 2, "bytes": 32, "gm_step": 32, "ub_step": 32}
    with pytest.raises(kind, match=text):
        bursts(program, x, **(base | options))


@pytest.mark.parametrize(
    ("op", "dtype", "combine"),
    [
        (0, torch.float32, torch.add), (1, torch.float32, torch.maximum), (2, torch.float16, torch.minimum),
        (3, torch.bfloat16, torch.add), (4, torch.int32, torch.add), (5, torch.int16, torch.maximum),
        (6, torch.int8, torch.add),
    ],
)  # fmt: skip
def test_atomic_stores_combine(program, op, dtype, combine):
    """Also from two cores at once: atomics do not race with one another."""
    x, y = ((torch.randn(32) * 20).to(dtype) for _ in range(2))
    for cores in (1, 2):
        got = y.clone()
        given_ = {"x": x.view(torch.uint8), "y": got.view(torch.uint8), "op": op, "bytes": x.nbytes}
        program(SOURCE).run(given_, cores=cores, kernel="atomics")
        expected = y
        for _ in range(cores):
            expected = combine(expected, x)
        assert torch.equal(got, expected)


def test_atomic_mode_is_left_and_has_something_to_add_to(program):
    x, y = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    given_ = {"x": x, "y": y, "bytes": 64}
    with pytest.raises(emulate.InstructionError, match="asc_set_atomic_none is missing"):
        program(SOURCE).run(given_ | {"op": 7}, cores=1, kernel="atomics")
    with pytest.raises(emulate.UndefinedError, match="an atomic store to tensor y byte 0"):
        program(SOURCE).run(given_ | {"op": 0}, cores=1, kernel="atomics", undefined=["y"])
