"""Loads and stores between UB and registers: each distribution, gathers, scatters and predicates, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cann_ops import emulate

N = 64
# x: 1024 floats at UB 0; each case writes from UB 4096 on, 512 bytes that are zero before.
CASES = {
    "asc_loadalign(r, x, 8);": lambda x: x[8:72],
    "asc_loadalign_brc_elem(r, x, 5);": lambda x: np.full(N, x[5]),
    "asc_loadalign_upsample(r, x, 8);": lambda x: np.repeat(x[8:40], 2),
    "asc_loadalign_downsample(r, x, 8);": lambda x: np.concatenate([x[8:72:2], np.zeros(32)]),
    "asc_loadalign_unpack(r, x, 8);": lambda x: spread(x[8:40], 2),
    "asc_loadalign_unpack4(r, x, 16);": lambda x: spread(x[16:32], 4),
    "asc_loadalign_brc_datablock(r, x, 8);": lambda x: np.tile(x[8:16], 8),
    "asc_loadalign_brc_elem2datablock(r, x, 8);": lambda x: np.repeat(x[8:16], 8),
    "vector_f32 s; asc_loadalign_deintlv(r, s, x, 8); asc_sub(r, r, s, all);": lambda x: x[8:136:2] - x[9:136:2],
    "auto p = x; asc_loadalign_postupdate(r, p, 64); asc_loadalign(r, p);": lambda x: x[64:128],
    "asc_gather(r, x, reverse, all);": lambda x: x[:64][::-1],
    "vector_u32 at; asc_shiftleft_scalar(at, reverse, 5, all); asc_gather_datablock(r, x, at, all);": lambda x: (
        np.concatenate([x[8 * k : 8 * k + 8] for k in range(63, 55, -1)])
    ),
}
STORES = {
    "asc_storealign(y, a, 8, m);": lambda a, m: np.concatenate([np.zeros(8), np.where(m, a, 0), np.zeros(56)]),
    "asc_storealign_1st(y, a, 3);": lambda a, m: at(3, a[:1]),
    "asc_storealign(y, a, 2, 0, m);": lambda a, m: np.stack(
        [np.where(m, a, 0).reshape(8, 8), np.zeros((8, 8))], 1
    ).reshape(-1),
    "auto p = y; asc_storealign_postupdate(p, a, 1, 8, all); asc_storealign(p, a, 0, all);": lambda a, m: (
        np.concatenate([a, a])
    ),
    "asc_scatter(y, a, reverse, m);": lambda a, m: np.concatenate([np.where(m, a, 0)[::-1], np.zeros(64)]),
    "asc_storealign_pack((__ubuf__ uint32_t*)y, (vector_u32&)a, 0, m);": lambda a, m: halves(a, m, np.uint16),
    "asc_storealign_pack_quarter((__ubuf__ uint32_t*)y, (vector_u32&)a, 8, m);": lambda a, m: at(
        8, halves(a, m, np.uint8)[:112]
    ),
    "asc_storealign((__ubuf__ uint32_t*)y, m, 0);": lambda a, m: at(
        0, np.packbits(np.repeat(m, 4) & (np.arange(256) % 4 == 0), bitorder="little").view(np.float32)
    ),
    "vector_bool h; asc_storealign((__ubuf__ uint32_t*)y, m, 0); asc_mem_bar(VST_VLD); "
    "asc_loadalign(h, (__ubuf__ uint32_t*)y, 0); asc_select(a, a, asc_host::filled(0.f), h); "
    "asc_storealign(y, a, 0, all);": lambda a, m: at(0, np.where(m, a, 0)),
}


def spread(values, step):
    out = np.zeros(len(values) * step, np.float32)
    out[::step] = values
    return out


def at(place, values):
    out = np.zeros(128, np.float32)
    out[place : place + len(values)] = values
    return out


def halves(a, m, dtype):
    low = np.where(m, a.astype(np.float32).view(np.uint32).astype(dtype), 0).astype(dtype)
    out = np.zeros(512 // np.dtype(dtype).itemsize, dtype)
    out[:64] = low
    return out.view(np.float32)


def source(codes, store):
    functions, calls = [], []
    for i, code in enumerate(codes):
        end = "" if store else "asc_storealign(y, r, 0, all);"
        functions.append(f"""
__simd_vf__ inline void case_{i}(__ubuf__ float* x, __ubuf__ float* y, int32_t lanes) {{
  vector_f32 a, r;
  asc_loadalign(a, x);
  vector_u32 reverse;
  asc_arange_descend(reverse, 63);
  uint32_t count = lanes;
  vector_bool m = asc_update_mask_b32(count), all = asc_create_mask_b32(PAT_ALL);
  {code}
  {end}
}}""")
        calls.append(f"  if (which == {i}) case_{i}((__ubuf__ float*)ub, (__ubuf__ float*)(ub + 4096), lanes);")
    body = "\n".join(calls)
    return f"""
#include "c_api/asc_simd.h"
{"".join(functions)}
__simd_vf__ inline void clear(__ubuf__ float* y) {{
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 zero;
  asc_duplicate_scalar(zero, 0.f, all);
  for (int i = 0; i < 4; ++i) asc_storealign(y, zero, 64 * i, all);
}}
extern "C" __global__ __vector__ void move(__gm__ float* out, __gm__ float* x, int32_t lanes, int32_t which) {{
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, (uint8_t*)x, 1, 4096, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 4096, 4096);
  clear((__ubuf__ float*)(ub + 4096));
  asc_sync();
{body}
  asc_sync();
  asc_copy_ub2gm_align((uint8_t*)out, ub + 4096, 1, 512, static_cast<asc_store_l2_cache_mode>(0), 512, 512);
}}
"""


def call(program, codes, index, lanes, store):
    x = torch.arange(1.0, 1025.0) + 0.5
    out = torch.zeros(128)
    program(source(codes, store)).run({"x": x, "out": out, "which": index, "lanes": lanes}, cores=1, undefined=["out"])
    return x.numpy(), out.numpy()


def test_loads(program):
    for index, (code, reference) in enumerate(CASES.items()):
        x, got = call(program, tuple(CASES), index, N, False)
        assert np.array_equal(got[:N], np.asarray(reference(x)).astype(np.float32)), code


@pytest.mark.parametrize("lanes", [0, 1, 33, 64])
def test_stores(program, lanes):
    m = np.arange(N) < lanes
    for index, (code, reference) in enumerate(STORES.items()):
        x, got = call(program, tuple(STORES), index, lanes, True)
        expected = np.asarray(reference(x[:N], m)).astype(np.float32)
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), code


FAULTS = """
#include "c_api/asc_simd.h"
__simd_vf__ inline void wrong(__ubuf__ uint8_t* ub, int32_t fault) {
  auto* x = (__ubuf__ float*)ub;
  vector_bool all = asc_create_mask_b32(PAT_ALL), unset;
  vector_f32 a, r, nothing;
  vector_u32 at;
  asc_loadalign(a, x);
  asc_arange(at, fault == 1 ? 63480u : 0u);
  if (fault <= 1) asc_gather(r, x, at, all);
  if (fault == 2) asc_gather(r, x, (vector_u32&)nothing, all);
  if (fault == 3) asc_scatter(x, a, (vector_u32&)nothing, all);
  if (fault == 4) asc_storealign(x, a, 0, unset);
  if (fault == 5) asc_loadalign(a, x, 3);
  if (fault == 6) asc_loadalign(a, x, 62 * 1024);
  if (fault == 7) { asc_arange(at, 1u); asc_gather(r, a, at); }
  vector_s32 zero;
  asc_duplicate_scalar(zero, 0, all);
  if (fault == 8) asc_div((vector_s32&)r, (vector_s32&)a, zero, all);
  if (fault == 9) x[0] = 1.f;
}
extern "C" __global__ __vector__ void faults(__gm__ uint8_t* x, int32_t fault) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, x, 1, 512, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 512, 512);
  asc_sync();
  wrong(ub, fault);
}
"""


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, emulate.BoundsError, r"asc_gather reads UB bytes \[253952, 253956\)"),
        (2, emulate.UndefinedError, "asc_gather: the index of lane 0 comes from undefined data"),
        (3, emulate.UndefinedError, "asc_scatter: the index of lane 0"),
        (4, emulate.UndefinedError, "asc_storealign: the mask of lane 0"),
        (5, emulate.AlignmentError, "asc_loadalign: got address 12, allowed are multiples of 32"),
        (6, emulate.BoundsError, "asc_loadalign reads UB bytes"),
        (7, emulate.BoundsError, "lane 63 asks for lane 64 of a register of 64"),
        (8, emulate.InstructionError, "an integer lane is divided by zero"),
        (9, emulate.InstructionError, "a SIMD function accesses UB without a register load or store"),
    ],
)
def test_faults_of_vector_accesses_are_found(program, fault, kind, text):
    x = torch.ones(512, dtype=torch.uint8)
    program(FAULTS).run({"x": x, "fault": 0}, cores=1)
    with pytest.raises(kind, match=text):
        program(FAULTS).run({"x": x, "fault": fault}, cores=1)
