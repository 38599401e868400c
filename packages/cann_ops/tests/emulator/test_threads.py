"""SIMT functions: warps, barriers, atomics, divergence, and the accesses of their threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cann_ops import emulate

SOURCE = """
#include "c_api/asc_simd.h"
#include "simt_api/cooperative_groups.h"
#define LANE(expression) y[threadIdx.x] = expression;
__simt_vf__ __launch_bounds__(64) inline void warp(__gm__ int32_t* x, __gm__ int32_t* y, int32_t which) {
  int32_t t = threadIdx.x, v = x[t];
  if (which == 0) LANE(asc_shfl_xor(v, 5))
  if (which == 1) LANE(asc_shfl(v, 3))
  if (which == 2) LANE(asc_shfl_up(v, 4))
  if (which == 3) LANE(asc_shfl_down(v, 4))
  if (which == 4) LANE(asc_reduce_add(v))
  if (which == 5) LANE(asc_reduce_max(v))
  if (which == 6) LANE(asc_reduce_min(v))
  if (which == 7) LANE((int32_t)asc_ballot(v > 0))
  if (which == 8) {
    y[t] = -1;
    if (t % 2) LANE((int32_t)asc_activemask())
  }
  if (which == 9) LANE((int32_t)laneid())
  if (which == 10) LANE(asc_shfl_xor(asc_reduce_add(v), 1) + asc_shfl(t, 31))
}
__simt_vf__ __launch_bounds__(256) inline void scan(__gm__ int32_t* x, __gm__ int32_t* y, __ubuf__ int32_t* s,
                                                    int32_t n, int32_t fault) {
  int32_t t = threadIdx.x;
  s[t] = t < n ? x[t] : 0;
  asc_syncthreads();
  for (int32_t d = 1; d < 256; d *= 2) {
    int32_t v = t >= d ? s[t - d] : 0;
    if (fault != 1) asc_syncthreads();
    s[t] += v;
    if (fault != 2) asc_syncthreads();
  }
  if (t < n) y[t] = s[t];
  if (fault == 3 && t == 7) y[-1] = 0;
  if (fault == 4 && t == 9) y[n] = 0;
  if (fault == 5 && t == 11) y[0] = s[300];
  if (fault == 6 && t < 32) asc_syncthreads();
  if (fault == 7) s[0] = t;
  if (fault == 8) s[16 << 20] = 1;
}
__simt_vf__ __launch_bounds__(2048) inline void count(__gm__ int32_t* x, __gm__ int32_t* y, int32_t n, int32_t fault) {
  int32_t t = threadIdx.x + blockDim.x * threadIdx.y;
  if (t < n) {
    int32_t slot = asc_atomic_add(y + x[t], 1);
    asc_atomic_max(y + 16, slot);
    asc_atomic_min(y + 17, t);
    if (fault == 1) y[x[t]] = 3;
  }
}
__simt_vf__ __launch_bounds__(32) inline void within_warp(__gm__ int32_t* y, __ubuf__ int32_t* s) {
  s[threadIdx.x] = threadIdx.x;
  cooperative_groups::coalesced_threads().sync();
  y[threadIdx.x] = s[31 - threadIdx.x];
}
extern "C" __global__ __vector__ void warps(__gm__ int32_t* x, __gm__ int32_t* y, int32_t which) {
  asc_vf_call<warp>(cce::dim3(64), x, y, which);
}
extern "C" __global__ __vector__ void scans(__gm__ int32_t* x, __gm__ int32_t* y, int32_t n, int32_t fault) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_vf_call<scan>(cce::dim3(256), x, y, (__ubuf__ int32_t*)ub, n, fault);
}
extern "C" __global__ __vector__ void counts(__gm__ int32_t* x, __gm__ int32_t* y, int32_t n, int32_t width,
                                             int32_t height, int32_t fault) {
  asc_vf_call<count>(cce::dim3(width, height), x, y, n, fault);
}
extern "C" __global__ __vector__ void pairs(__gm__ int32_t* y) {
  __ubuf__ uint8_t *ub = (__ubuf__ uint8_t *)0;
  asc_vf_call<within_warp>(cce::dim3(32), y, (__ubuf__ int32_t*)ub);
}
"""


def test_operations_of_a_warp(program):
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 50, 64, np.int32)
    lane, rows = np.arange(64) % 32, x.reshape(2, 32)
    up, down = np.where(lane >= 4, np.roll(x, 4), x), np.where(lane < 28, np.roll(x, -4), x)
    ballot = [(row > 0) @ (1 << np.arange(32, dtype=np.int64)) for row in rows]
    sums = np.repeat(rows.sum(1), 32)
    expected = {
        0: x[np.arange(64) ^ 5], 1: np.repeat(rows[:, 3], 32), 2: up, 3: down, 4: sums,
        5: np.repeat(rows.max(1), 32), 6: np.repeat(rows.min(1), 32), 7: np.repeat(ballot, 32),
        8: np.where(lane % 2, 0xAAAAAAAA, -1), 9: lane, 10: sums + np.repeat([31, 63], 32),
    }  # fmt: skip
    for which, wanted in expected.items():
        y = torch.zeros(64, dtype=torch.int32)
        program(SOURCE).run(
            {"x": torch.from_numpy(x), "y": y, "which": which}, cores=1, kernel="warps", undefined=["y"]
        )
        assert np.array_equal(y.numpy(), np.asarray(wanted).astype(np.int64).astype(np.int32)), which


def scan(program, n, fault=0, **options):
    x, y = torch.randint(-9, 9, (max(n, 1),), dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    program(SOURCE).run({"x": x, "y": y, "n": n, "fault": fault}, cores=1, kernel="scans", undefined=["y"], **options)
    return y, x[:n].cumsum(0).int()


@pytest.mark.parametrize("n", [0, 1, 31, 33, 256])
def test_barriers_order_the_threads(program, n):
    y, expected = scan(program, n)
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, emulate.RaceError, r"UB byte \d+: thread \d+ (reads|writes) it and thread \d+ touched it, with no asc_s"),
        (2, emulate.RaceError, r"UB byte \d+: thread \d+ (reads|writes) it and thread \d+ touched it"),
        (3, emulate.BoundsError, r"a SIMT thread writes tensor y bytes \[-4, 0\)"),
        (4, emulate.BoundsError, r"a SIMT thread writes tensor y bytes \[400, 404\), allowed is \[0, 400\)"),
        (5, emulate.UndefinedError, "a SIMT thread reads UB byte 1200, which nothing has written"),
        (6, emulate.FlagError, "scan: 32 threads wait in asc_syncthreads and 224 have ended"),
        (7, emulate.RaceError, r"UB byte 0: thread 1 writes it and"),
        (8, emulate.BoundsError, "a SIMT thread uses byte 67108864 from its unified buffer on, which is outside"),
    ],
)
def test_faults_of_threads_are_found(program, fault, kind, text):
    with pytest.raises(kind, match=text):
        scan(program, 100, fault)


def test_threads_may_be_allowed_to_read_poison(program):
    x, y = torch.ones(100, dtype=torch.int32), torch.zeros(100, dtype=torch.int32)
    with pytest.raises(emulate.RaceError, match="thread 11 writes it"):  # y[0], which thread 0 wrote
        given = {"x": x, "y": y, "n": 100, "fault": 5}
        program(SOURCE).run(given, cores=1, kernel="scans", undefined=["y"], threads_read_undefined=True)


@pytest.mark.parametrize(("n", "width", "height"), [(0, 1, 1), (1, 32, 1), (2000, 1024, 2), (77, 7, 11)])
def test_atomics(program, n, width, height):
    x = torch.randint(0, 16, (max(n, 1),), dtype=torch.int32)
    y = torch.zeros(18, dtype=torch.int32)
    y[17] = 5
    given = {"x": x, "y": y, "n": n, "width": width, "height": height, "fault": 0}
    program(SOURCE).run(given, cores=1, kernel="counts")
    counts = torch.bincount(x[:n].long(), minlength=16).int()
    assert torch.equal(y[:16], counts)
    assert y[16] == max(0, int(counts.max()) - 1) and y[17] == (0 if n else 5)


def test_atomics_and_plain_stores_race(program):
    given = {"x": torch.zeros(8, dtype=torch.int32), "n": 8, "width": 8, "height": 1, "fault": 1}
    with pytest.raises(emulate.RaceError, match=r"tensor y byte 0: thread 1 writes it and thread 0|writes it and atom"):
        program(SOURCE).run(given | {"y": torch.zeros(18, dtype=torch.int32)}, cores=1, kernel="counts")
    with pytest.raises(emulate.InstructionError, match=r"got \(2049, 1, 1\) threads, allowed are 1 to 2048"):
        given |= {"width": 2049, "y": torch.zeros(18, dtype=torch.int32)}
        program(SOURCE).run(given, cores=1, kernel="counts")


def test_a_barrier_of_a_warp_orders_its_threads(program):
    y = torch.zeros(32, dtype=torch.int32)
    program(SOURCE).run({"y": y}, cores=1, kernel="pairs", undefined=["y"])
    assert torch.equal(y, torch.arange(31, -1, -1, dtype=torch.int32))
