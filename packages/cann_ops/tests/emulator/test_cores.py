"""Cores that wait for one another: the cube core and the vector cores of a block, and the cores of a grid."""

from __future__ import annotations

import pytest
import torch

from cann_ops import emulate

# Per block: both vector cores put half of A's rows into L1 (rows as they are: 16 by 16), the cube core multiplies by B,
# the vector cores get half of the rows each, add 1, and write them.
MIXED = """
#include "c_api/asc_simd.h"
auto kLoad = static_cast<asc_load_l2_cache_mode>(0);
auto kStore = static_cast<asc_store_l2_cache_mode>(0);
__simd_vf__ inline void add_one(__ubuf__ float* x, int32_t registers) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  for (int i = 0; i < registers; ++i) {
    vector_f32 a, b;
    asc_loadalign(a, x + 64 * i);
    asc_add_scalar(b, a, 1.f, all);
    asc_storealign(x + 64 * i, b, 0, all);
  }
}
extern "C" __global__ __mix__(1, 2) void mixed(__gm__ half* a, __gm__ half* b, __gm__ float* c, int32_t rounds,
                                               int32_t dual, int32_t fault) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  __cbuf__ uint8_t *l1 = (__cbuf__ uint8_t *)0;
  int32_t block = block_idx * rounds;
  if ASC_IS_AIC {
    asc_set_gm2l1_nz_para(1, 1, 16, 0);
    asc_copy_gm2l1_nd2nz((half*)l1 + 256, b, 32, kLoad, 16, 16, 0, 0);
    asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
    asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
    asc_copy_l12l0b((half*)0, (half*)l1 + 256, 0, 0, 1, 1, 1, 1);
    for (int32_t r = 0; r < rounds; ++r) {
      if (fault != 1) asc_sync_intra_wait(PIPE_MTE1, 0);
      asc_sync_intra_wait(PIPE_MTE1, 16);
      asc_copy_l12l0a((half*)0, (half*)l1, 0, 0, 1, 1, 1, 1);
      asc_sync_intra_arrive(PIPE_MTE1, 3);
      asc_sync_intra_arrive(PIPE_MTE1, 19);
      asc_sync_notify(PIPE_MTE1, PIPE_M, static_cast<event_t>(0));
      asc_sync_wait(PIPE_MTE1, PIPE_M, static_cast<event_t>(0));
      asc_mmad((float*)0, (half*)0, (half*)0, 16, 16, 16, 0, 1, 0, true);
      asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
      asc_sync_notify(PIPE_M, PIPE_MTE1, static_cast<event_t>(0));
      asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
      if (r > 0 && fault != 4) {
        asc_sync_intra_wait(PIPE_FIX, 2);
        asc_sync_intra_wait(PIPE_FIX, 18);
      }
      asc_copy_l0c2ub((float*)(ub + 1024), (float*)0, 16, fault == 6 ? 15 : 16, 16, 16, 0,
                      static_cast<asc_dual_dst_mode>(dual), static_cast<asc_unit_flag_mode>(0),
                      static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
      if (fault != 2) asc_sync_intra_arrive(PIPE_FIX, 1);
      asc_sync_intra_arrive(PIPE_FIX, 17);
      asc_sync_notify(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
      asc_sync_wait(PIPE_FIX, PIPE_M, static_cast<event_t>(0));
      asc_sync_wait(PIPE_M, PIPE_MTE1, static_cast<event_t>(0));
    }
    if (fault == 7) ub[0] = 1;
  }
  if ASC_IS_AIV {
    int32_t sub = asc_get_sub_block_id();
    for (int32_t r = 0; r < rounds; ++r) {
      if (r > 0) {
        asc_sync_notify(PIPE_MTE3, PIPE_MTE2, static_cast<event_t>(1));
        asc_sync_wait(PIPE_MTE3, PIPE_MTE2, static_cast<event_t>(1));
        if (fault != 5) asc_sync_intra_wait(PIPE_MTE3, 3);
      }
      asc_copy_gm2ub_align(ub, (uint8_t*)(a + (block + r) * 256 + sub * 128), 1, 256, 0, 0, 0, kLoad, 256, 256);
      asc_sync_notify(PIPE_MTE2, PIPE_MTE3, static_cast<event_t>(0));
      asc_sync_wait(PIPE_MTE2, PIPE_MTE3, static_cast<event_t>(0));
      asc_copy_ub2l1(l1 + sub * 256, ub, 1, 8, 0, 0);
      if (!(fault == 8 && sub == 1)) asc_sync_intra_arrive(PIPE_MTE3, 0);
      if (fault != 3) asc_sync_intra_wait(PIPE_V, 1);
      add_one((__ubuf__ float*)(ub + 1024), 2);
      asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
      asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
      if (dual == 1) {
        asc_copy_ub2gm_align((uint8_t*)(c + (block + r) * 256 + sub * 128), ub + 1024, 1, 512, kStore, 512, 512);
      } else {
        asc_copy_ub2gm_align((uint8_t*)(c + (block + r) * 256 + sub * 8), ub + 1024, 16, 32, kStore, 64, 64);
      }
      asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
      asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
      if (r + 1 < rounds) asc_sync_intra_arrive(PIPE_MTE3, 2);
    }
    if (rounds > 0) asc_sync_intra_wait(PIPE_MTE3, 3);
  }
}
"""


def mixed(program, blocks, rounds, fault=0, dual=1):
    a, b = torch.randn(blocks * rounds, 16, 16).half(), torch.randn(16, 16).half()
    c = torch.zeros(blocks * rounds, 16, 16)
    given = {"a": a, "b": b, "c": c, "rounds": rounds, "dual": dual, "fault": fault}
    report = program(MIXED).run(given, cores=blocks, undefined=["c"])
    return c, a.float() @ b.float().T + 1, report


@pytest.mark.parametrize(("blocks", "rounds"), [(1, 0), (1, 1), (2, 3), (32, 1)])
def test_a_block_passes_work_between_its_cores(program, blocks, rounds):
    c, expected, report = mixed(program, blocks, rounds)
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5)
    assert report.defined["c"].all()


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, emulate.RaceError, r"L1 byte 0: the read by pipe MTE1 .* comes after a write by pipe MTE3 of block 0, vec"),
        (2, emulate.FlagError, r"every core that is left waits.*vector 0: asc_sync_intra_wait\(V, 1\), line \d+"),
        (
            3,
            emulate.RaceError,
            r"UB byte 1024: the write by pipe FIX .* comes after a read by pipe (V|MTE3) of block",
        ),
        (4, emulate.FlagError, "at the end 1 settings of flag 2 between cores of block 0 were not waited for"),
        (5, emulate.FlagError, "at the end 1 settings of flag 3 between cores of block 0 were not waited for"),
        (6, emulate.InstructionError, "15 rows by 16 columns do not split"),
        (7, emulate.BoundsError, "unified buffer on, which is outside or of another core"),
        (8, emulate.FlagError, r"every core that is left waits.*cube core: asc_sync_intra_wait\(MTE1, 16\)"),
    ],
)
def test_faults_between_cores_are_found(program, fault, kind, text):
    """Waits 4 and 5 follow from others in this kernel: there is no race, but flags that are set and not taken."""
    with pytest.raises(kind, match=text):
        mixed(program, 2, 2, fault)


# The vector cores swap halves of a row through global memory; the cube core copies in between, as scalar code.
BLOCK = """
#include "c_api/asc_simd.h"
extern "C" __global__ __mix__(1, 2) void swap(__gm__ int32_t* x, __gm__ int32_t* y, __gm__ int32_t* z, int32_t fault) {
  if ASC_IS_AIC {
    if (fault != 1) asc_sync_block_wait(PIPE_S, 3);
    for (int i = 0; i < 16; ++i) z[i] = y[i] * 2;
    if (fault != 2) asc_sync_block_arrive(PIPE_S, 4);
  }
  if ASC_IS_AIV {
    int32_t me = asc_get_sub_block_id() * 8, other = 8 - me;
    for (int i = 0; i < 8; ++i) y[me + i] = x[me + i] + 1;
    asc_sync_subblock_arrive(PIPE_S, 5);
    if (fault != 3) asc_sync_subblock_wait(PIPE_S, 5);
    int32_t sum = 0;
    for (int i = 0; i < 8; ++i) sum += y[other + i];
    if (!(fault == 4 && me == 8)) asc_sync_block_arrive(PIPE_S, 3);
    if (fault != 2) asc_sync_block_wait(PIPE_S, 4);
    for (int i = 0; i < 8; ++i) x[me + i] = z[other + i] + sum;
  }
}
"""


def swap(program, fault=0):
    x = torch.arange(16, dtype=torch.int32)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    given = {"x": x.clone(), "y": y, "z": z, "fault": fault}
    program(BLOCK).run(given, cores=1, undefined=["y", "z"])
    return given["x"], (x + 1)


def test_flags_of_a_whole_block(program):
    got, plus = swap(program)
    low, high = plus[:8], plus[8:]
    assert torch.equal(got, torch.cat([2 * high + high.sum(), 2 * low + low.sum()]).int())


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, (emulate.UndefinedError, emulate.RaceError), "tensor y byte 0"),
        (2, (emulate.UndefinedError, emulate.RaceError), "tensor z byte"),
        (3, (emulate.UndefinedError, emulate.RaceError), "tensor y byte"),
        (4, emulate.FlagError, r"asc_sync_block_wait\(S, 3\)"),
    ],
)
def test_faults_of_a_whole_block_are_found(program, fault, kind, text):
    with pytest.raises(kind, match=text):
        swap(program, fault)


GRID = """
#include "c_api/asc_simd.h"
auto kLoad = static_cast<asc_load_l2_cache_mode>(0);
auto kStore = static_cast<asc_store_l2_cache_mode>(0);
// Each core writes its block of x + 1, all wait for all, each reads the block of its neighbour.
__simd_vf__ inline void add_one(__ubuf__ float* x) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 a, b;
  asc_loadalign(a, x);
  asc_add_scalar(b, a, 1.f, all);
  asc_storealign(x, b, 0, all);
}
extern "C" __global__ __vector__ void around(__gm__ float* x, __gm__ float* y, __gm__ float* z, int32_t rounds,
                                             int32_t fault) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  for (int32_t r = 0; r < rounds; ++r) {
    int32_t me = block_idx, next = (block_idx + 1) % gridDim.x;
    asc_copy_gm2ub_align(ub, (uint8_t*)(x + 64 * me), 1, 256, 0, 0, 0, kLoad, 256, 256);
    asc_sync();
    add_one((__ubuf__ float*)ub);
    asc_sync();
    asc_copy_ub2gm_align((uint8_t*)(y + 64 * me), ub, 1, 256, kStore, 256, 256);
    if (!(fault == 1)) {
      asc_sync_inter_arrive(PIPE_MTE3, 0);
      if (!(fault == 2 && me == 1)) asc_sync_inter_wait(PIPE_MTE2, 0);
    }
    asc_copy_gm2ub_align(ub + 256, (uint8_t*)(y + 64 * next), 1, 256, 0, 0, 0, kLoad, 256, 256);
    asc_sync();
    asc_copy_ub2gm_align((uint8_t*)(z + 64 * me), ub + 256, 1, 256, kStore, 256, 256);
    if (fault != 3) {
      asc_sync_inter_arrive(PIPE_MTE2, 1);
      asc_sync_inter_wait(PIPE_MTE3, 1);
    }
    asc_sync();
  }
  if (fault == 4 && block_idx == 0) asc_sync_inter_wait(PIPE_MTE2, 0);
  if (fault == 5) asc_sync_intra_arrive(PIPE_MTE2, 0);
}
"""


def around(program, cores, rounds, fault=0):
    x = torch.randn(cores, 64)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    program(GRID).run({"x": x, "y": y, "z": z, "rounds": rounds, "fault": fault}, cores=cores, undefined=["y", "z"])
    return z, (x + 1).roll(-1, 0)


@pytest.mark.parametrize(("cores", "rounds"), [(1, 1), (2, 1), (5, 3), (64, 2)])
def test_a_grid_waits_for_all_its_cores(program, cores, rounds):
    z, expected = around(program, cores, rounds)
    assert torch.equal(z, expected)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, (emulate.RaceError, emulate.UndefinedError), r"tensor y byte \d+: the write by pipe MTE3 .* comes after a"),
        (2, emulate.RaceError, r"tensor y byte \d+: the (read|write) by pipe MTE"),
        (
            3,
            emulate.RaceError,
            r"tensor y byte \d+: the write by pipe MTE3 .* comes after a read by pipe MTE2 ",
        ),
        (4, emulate.FlagError, r"deadlock|every core that is left waits"),
        (5, emulate.InstructionError, "asc_sync_intra needs a mixed kernel"),
    ],
)
def test_faults_of_a_grid_are_found(program, fault, kind, text):
    with pytest.raises(kind, match=text):
        around(program, 3, 2, fault)
