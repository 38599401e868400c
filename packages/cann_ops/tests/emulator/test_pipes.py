"""Flags, barriers and bounds of a vector kernel: the right kernel runs, and each planted fault is found."""

from __future__ import annotations

import pytest
import torch

from cann_ops import emulate

# Doubles tiles of 64 floats, with one buffer in and one out. `fault` leaves something out or gets it wrong.
SOURCE = """
#include "c_api/asc_simd.h"
__simd_vf__ inline void twice(__ubuf__ float* in, __ubuf__ float* out, int32_t fault) {
  vector_bool m = asc_create_mask_b32(PAT_ALL);
  vector_f32 x, y, z;
  asc_loadalign(x, in);
  asc_add(y, x, x, m);
  asc_storealign(out, y, 0, m);
  if (fault == 9) {
    asc_loadalign(z, out);
    asc_storealign(out, z, 0, m);
  }
  if (fault == 10) asc_storealign(out + 1, y, 0, m);
  if (fault == 11) asc_storealign(out + 62 * 1024, y, 0, m);
}
extern "C" __global__ __vector__ void double_tiles(__gm__ float* x, __gm__ float* y, int32_t tiles, int32_t fault) {
  asc_init();
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  __ubuf__ float* in = (__ubuf__ float*)ub;
  __ubuf__ float* out = (__ubuf__ float*)(ub + 256);
  auto load = static_cast<asc_load_l2_cache_mode>(0);
  auto store = static_cast<asc_store_l2_cache_mode>(0);
  if (fault != 1) asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  if (fault != 3) asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  for (int32_t t = block_idx; t < tiles; t += gridDim.x) {
    if (fault != 1 && fault != 23) asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    int32_t from = t * 64 + (fault == 13), bytes = fault == 12 ? 128 : 256;
    asc_copy_gm2ub_align((uint8_t*)in, (uint8_t*)(x + from), 1, bytes, 0, 0, 0, load, 256, 256);
    if (fault == 8) asc_copy_gm2ub_align((uint8_t*)in, (uint8_t*)(x + t * 64), 1, 256, 0, 0, 0, load, 256, 256);
    if (fault != 6) asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    if (fault == 7) asc_sync_notify(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    if (fault != 2) asc_sync_wait(PIPE_MTE2, PIPE_V, static_cast<event_t>(0));
    if (fault != 3 && fault != 24) asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
    twice(in, out, fault);
    if (fault != 1) asc_sync_notify(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
    asc_sync_notify(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    if (fault != 4) asc_sync_wait(PIPE_V, PIPE_MTE3, static_cast<event_t>(0));
    int32_t past = fault == 14 ? 1 : fault == 15 ? -64 * (tiles + 1) : 0;
    asc_copy_ub2gm_align((uint8_t*)(y + t * 64 + past), (uint8_t*)out, 1, 256, store, 256, 256);
    if (fault == 16) asc_copy_ub2gm_align((uint8_t*)(y + t * 64), (uint8_t*)(ub + 4), 1, 32, store, 256, 256);
    if (fault == 17 && in[0] > 0.f) y[0] = 1.f;
    if (fault == 18 && out[128] > 0.f) y[0] = 1.f;
    if (fault == 19) out[0] = 3.f;
    if (fault == 20) asc_copy_l12l0a((half*)0, (half*)0, 0, 0, 1, 1, 1, 1);
    if (fault == 21) *(int32_t*)64 = 1;
    if (fault == 22) asc_copy_gm2ub_align((uint8_t*)(ub + (250 << 10)), (uint8_t*)x, 1, 32, 0, 0, 0, load, 32, 32);
    if (fault != 3) asc_sync_notify(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
  }
  if (fault != 1 && fault != 5) asc_sync_wait(PIPE_V, PIPE_MTE2, static_cast<event_t>(0));
  if (fault != 3) asc_sync_wait(PIPE_MTE3, PIPE_V, static_cast<event_t>(0));
}
"""

FAULTS = {
    1: (emulate.RaceError, r"UB byte 0: the write by pipe MTE2 .* comes after a read by pipe V"),
    2: (emulate.RaceError, r"UB byte 0: the read by pipe V .* comes after a write by pipe MTE2"),
    3: (emulate.RaceError, r"UB byte 256: the write by pipe V .* comes after a read by pipe MTE3"),
    4: (emulate.RaceError, r"UB byte 256: the read by pipe MTE3 .* comes after a write by pipe V"),
    5: (emulate.FlagError, r"at the end the flag \(V, MTE2, 0\) is set"),
    6: (emulate.FlagError, r"asc_sync_wait\(MTE2, V, 0\), line \d+: nothing notified"),
    7: (emulate.FlagError, r"asc_sync_notify\(MTE2, V, 0\), line \d+: the flag is set already"),
    8: (emulate.RaceError, r"by pipe MTE2 .* comes after a write by pipe MTE2 .*no barrier of the pipe"),
    9: (emulate.RaceError, r"asc_mem_bar\(VST_VLD\) is missing"),
    10: (emulate.AlignmentError, r"asc_storealign: got address 260, allowed are multiples of 32"),
    11: (emulate.BoundsError, r"asc_storealign writes UB bytes \[254208, 254464\), allowed is \[0, 253952\)"),
    13: (emulate.BoundsError, r"reads tensor x bytes \[\d+, \d+\), allowed is \[0, \d+\)"),
    14: (emulate.BoundsError, r"asc_copy_ub2gm_align writes tensor y bytes"),
    15: (emulate.BoundsError, r"asc_copy_ub2gm_align writes tensor y bytes \[-\d+"),
    16: (emulate.AlignmentError, r"asc_copy_ub2gm_align: got address 4"),
    17: (emulate.RaceError, r"UB byte 0: the read by pipe S .* comes after a write by pipe MTE2"),
    18: (emulate.UndefinedError, r"scalar code reads UB byte 768, which nothing has written"),
    19: (emulate.RaceError, r"UB byte 256: the write by pipe S .* comes after a (write by pipe V|read by pipe MTE3)"),
    20: (emulate.InstructionError, r"asc_copy_l12l0a runs on pipe MTE1, which this kind of core does not have"),
    21: (emulate.BoundsError, r"scalar code uses address 64"),
    22: (emulate.BoundsError, r"writes UB bytes \[256000, 256032\)"),
    23: (emulate.FlagError, r"asc_sync_notify\(V, MTE2, 0\), line \d+: the flag is set already"),
    24: (emulate.FlagError, r"asc_sync_notify\(MTE3, V, 0\), line \d+: the flag is set already"),
}  # fmt: skip


def run(program, tiles, fault=0, cores=2, **options):
    x = torch.randn(tiles * 64)
    y = torch.full((tiles * 64,), 5.0)
    report = program(SOURCE).run(
        {"x": x, "y": y, "tiles": tiles, "fault": fault}, cores=cores, undefined=["y"], **options
    )
    return x, y, report


@pytest.mark.parametrize(("tiles", "cores"), [(0, 1), (1, 1), (1, 3), (2, 2), (7, 3), (5, 64)])
def test_the_right_kernel_runs_on_any_number_of_cores(program, tiles, cores):
    x, y, report = run(program, tiles, cores=cores)
    assert torch.equal(y, 2 * x)
    assert report.defined["y"].all() and report.defined["y"].size == 256 * tiles
    assert (report.read_bytes, report.written_bytes) == (256 * tiles, 256 * tiles)
    assert report.instructions == 3 * tiles


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(program, fault):
    kind, text = FAULTS[fault]
    with pytest.raises(kind, match=text):
        run(program, 6, fault)


@pytest.mark.parametrize("fault", [1, 3])
def test_a_buffer_that_is_used_once_needs_no_flag_of_its_reader(program, fault):
    x, y, _ = run(program, 2, fault, cores=2)
    assert torch.equal(y, 2 * x)


def test_what_a_short_copy_leaves_is_undefined_in_the_result(program):
    """The second half of each tile was not loaded: it runs through the sums and is marked, not an error."""
    x, y, report = run(program, 2, fault=12)
    tiles, known = y.reshape(2, 64), torch.from_numpy(report.defined["y"]).reshape(2, 64, 4)
    assert torch.equal(tiles[:, :32], 2 * x.reshape(2, 64)[:, :32])
    assert known[:, :32].all() and not known[:, 32:].any()


@pytest.mark.parametrize("fault", [1, 3, 9])
def test_without_the_checks_races_pass_and_program_order_decides(program, fault):
    """What the emulator computes is right all the same: only the clocks show these faults."""
    x, y, _ = run(program, 6, fault, checked=False)
    assert torch.equal(y, 2 * x)


def test_an_error_leaves_the_tensors_as_they_were(program):
    x, y = torch.ones(64), torch.full((64,), 7.0)
    with pytest.raises(emulate.RaceError):
        program(SOURCE).run({"x": x, "y": y, "tiles": 1, "fault": 4}, cores=1, undefined=["y"])
    assert torch.equal(y, torch.full((64,), 7.0)) and torch.equal(x, torch.ones(64))


def test_errors_name_block_and_line(program):
    with pytest.raises(emulate.RaceError, match=r"line \d+.*\[block 0.*line \d+\]"):
        run(program, 6, 2)


def test_a_buffer_that_overflows_into_the_next_is_found(program):
    """The copies of this kernel take 256 bytes each way; a register load may reach over, a store and a copy may not."""
    run(program, 4, buffers={"in": (0, 256), "out": (256, 256)})
    with pytest.raises(emulate.BoundsError, match=r"writes bytes \[0, 256\) of buffer in in UB, allowed is \[0, 128\)"):
        run(program, 4, buffers={"in": (0, 128), "next": (128, 128), "out": (256, 256)})
    with pytest.raises(emulate.BoundsError, match=r"asc_storealign writes bytes .* of buffer out in UB"):
        run(program, 4, buffers={"in": (0, 256), "out": (256, 255)})
    with pytest.raises(
        emulate.BoundsError, match=r"asc_storealign writes UB bytes \[256, 512\), where no buffer begins"
    ):
        run(program, 4, buffers={"in": (0, 256)})


@pytest.mark.parametrize(
    ("buffers", "text"),
    [
        ({"a": (-1, 4)}, "buffers: got a at -1"),
        ({"a": (0, 0)}, "buffers: got a at 0 with 0 bytes"),
        ({"a": (250 << 10, 1)}, "allowed is within"),
        ({"b": (16, 32), "a": (0, 32)}, "buffers: got b at 16, but a ends at 32"),
    ],
)
def test_wrong_buffers_are_named(program, buffers, text):
    with pytest.raises(ValueError, match=text):
        run(program, 1, buffers=buffers)


def test_two_cores_that_write_the_same_bytes_race(program):
    source = """
#include "c_api/asc_simd.h"
extern "C" __global__ __vector__ void both(__gm__ int32_t* y, int32_t atomic) {
  if (atomic) asc_atomic_add(y, 1); else y[0] = block_idx;
}
"""
    y = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(emulate.RaceError, match=r"tensor y byte 0: the write by pipe S .* pipe S of block 0"):
        program(source).run({"y": y, "atomic": 0}, cores=2)
    program(source).run({"y": y, "atomic": 1}, cores=5)
    assert y.tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    program(source).run({"y": y, "atomic": 0}, cores=1)
    assert y[0] == 0
