"""TileLang's own device headers on the emulator: reductions over threads, random numbers, register wrappers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("tilelang", reason="TileLang is not installed: its headers are not there")

SOURCE = """
#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/dcache_bypass.h>
#include <tl_templates/ascend/nd2nz_copy.h>
#include <tl_templates/ascend/philox_rng.h>
#include <tl_templates/ascend/simd_inst.h>
#define REDUCE(i, op, threads, scale) \\
  if (which == i) y[t] = tl::AscendAllReduce<tl::op, threads, scale, 0>::run(x[t], ub);
__simt_vf__ __launch_bounds__(128) inline void reduce(__gm__ float* x, __gm__ float* y, __ubuf__ float* ub,
                                                      int32_t which) {
  int32_t t = threadIdx.x;
  REDUCE(0, SumOp, 128, 1)
  REDUCE(1, MaxOp, 128, 1)
  REDUCE(2, MinOp, 32, 1)
  REDUCE(3, SumOp, 16, 1)
  REDUCE(4, MaxOp, 16, 4)
  REDUCE(5, SumOp, 128, 8)
  REDUCE(6, SumOp, 96, 3)
}
__simt_vf__ __launch_bounds__(64) inline void draw(__gm__ float* y, int32_t seed) {
  tl::AscendPhiloxState state;
  tl::philox_init(&state, seed, threadIdx.x, 0);
  float2 two = tl::philox_rand_uniform2(&state);
  y[4 * threadIdx.x] = two.x;
  y[4 * threadIdx.x + 1] = two.y;
  y[4 * threadIdx.x + 2] = tl::philox_rand_normal(&state);
  y[4 * threadIdx.x + 3] = tl::philox_rand_normal(&state);
}
__simd_vf__ inline void wrappers(__ubuf__ float* x, __ubuf__ float* y) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), half = asc_create_mask_b32(PAT_H);
  auto a = simd_inst::vlds_norm<float>(x, 0);
  auto b = simd_inst::vdiv_0ulp_ftz_true(simd_inst::vdup<float>(1.f, all, MODE_ZEROING), a, all, MODE_ZEROING);
  simd_inst::vadd(b, a, a, half, MODE_MERGING);
  auto pair = simd_inst::vdintlv(a, b);
  simd_inst::vsts_norm(b, y, 0, all);
  simd_inst::vsts_norm(simd_inst::vsqrt_0ulp_ftz_false(simd_inst::vabs(pair.v0, all, MODE_ZEROING), all, MODE_ZEROING),
                       y, 64, all);
}
extern "C" __global__ __vector__ void reductions(__gm__ float* x, __gm__ float* y, int32_t which) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_vf_call<reduce>(cce::dim3(which == 6 ? 96 : 128), x, y, (__ubuf__ float*)ub, which);
}
extern "C" __global__ __vector__ void randoms(__gm__ float* y, int32_t seed) {
  asc_vf_call<draw>(cce::dim3(64), y, seed);
}
extern "C" __global__ __vector__ void registers(__gm__ float* x, __gm__ float* y) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, (uint8_t*)x, 1, 256, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 256, 256);
  asc_sync();
  wrappers((__ubuf__ float*)ub, (__ubuf__ float*)(ub + 256));
  asc_sync();
  asc_copy_ub2gm_align((uint8_t*)y, ub + 256, 1, 512, static_cast<asc_store_l2_cache_mode>(0), 512, 512);
  tl::write_gm_bypass_dcache(y + 128, tl::read_gm_bypass_dcache(x + 3));
}
extern "C" __global__ __vector__ void fractals(__gm__ half* x, __gm__ half* y) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_copy_gm2ub_align(ub, (uint8_t*)x, 1, 32 * 48 * 2, 0, 0, 0, static_cast<asc_load_l2_cache_mode>(0), 0, 0);
  asc_sync();
  ascend_nd2nz_scatter<32, 48, half, half>((__ubuf__ half*)ub, (__ubuf__ half*)(ub + 4096));
  asc_sync();
  asc_copy_ub2gm_align((uint8_t*)y, ub + 4096, 1, 33 * 48 * 2, static_cast<asc_store_l2_cache_mode>(0), 0, 0);
}
"""


def test_reductions_over_threads(program):
    x = torch.randn(128)
    rows = {
        0: x.sum().expand(128), 1: x.max().expand(128), 2: x.reshape(4, 32).min(1).values.repeat_interleave(32),
        3: x.reshape(8, 16).sum(1).repeat_interleave(16), 4: x.reshape(8, 4, 4).max(1).values.repeat(1, 4).reshape(-1),
        5: x.reshape(16, 8).sum(0).repeat(16), 6: x[:96].reshape(32, 3).sum(0).repeat(32),
    }  # fmt: skip
    for which, expected in rows.items():
        y = torch.zeros(128)
        program(SOURCE).run({"x": x, "y": y, "which": which}, cores=1, kernel="reductions", undefined=["y"])
        torch.testing.assert_close(y[: len(expected)], expected, rtol=1e-5, atol=1e-5)


def test_random_numbers_depend_on_seed_and_thread_only(program):
    draws = []
    for seed in (1, 1, 2):
        y = torch.zeros(64, 4)
        program(SOURCE).run({"y": y, "seed": seed}, cores=1, kernel="randoms", undefined=["y"])
        draws.append(y)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    uniform, normal = draws[0][:, :2], draws[0][:, 2:]
    assert ((uniform > 0) & (uniform < 1)).all() and len(uniform.unique()) == 128
    assert abs(normal.mean()) < 0.4 and 0.6 < normal.std() < 1.4


def test_register_wrappers(program):
    x, y = torch.rand(64) + 0.5, torch.zeros(129)
    program(SOURCE).run({"x": x, "y": y}, cores=1, kernel="registers", undefined=["y"])
    b = torch.where(torch.arange(64) < 32, 2 * x, 1 / x)
    assert torch.equal(y[:64], b)
    assert np.array_equal(y[64:128].numpy(), np.sqrt(torch.cat([x, b])[::2].numpy()))
    assert y[128] == x[3]


def test_rows_become_fractals(program):
    """Blocks of 16 numbers; those of one column stand below each other, with one row of padding."""
    x = torch.randn(32, 48).half()
    y = torch.zeros(3, 33, 16).half()
    report = program(SOURCE).run({"x": x, "y": y}, cores=1, kernel="fractals", undefined=["y"])
    assert torch.equal(y[:, :32], x.reshape(32, 3, 16).permute(1, 0, 2))
    known = report.defined["y"].reshape(3, 33, 32)
    assert known[:, :32].all() and not np.any(known[:, 32])
