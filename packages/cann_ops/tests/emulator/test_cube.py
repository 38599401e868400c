"""The cube core: layouts into L1 and L0, products and block-scaled products, results to global memory, and faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_ops import emulate

SOURCE = """
#include "c_api/asc_simd.h"
auto kLoad = static_cast<asc_load_l2_cache_mode>(0);
auto kStore = static_cast<asc_store_l2_cache_mode>(0);
// C = A B^T, or A B with B given as [k, n]; in `steps` parts along k that add up.
template <class T, class D>
void product(T* a, T* b, D* c, int m, int n, int k, int steps, int nn, int quant, int relu, int fault) {
  constexpr int kRow = 32 / sizeof(T);
  int mb = (m + 15) / 16, nb = (n + 15) / 16, kb = (k + kRow - 1) / kRow;
  T* la = (T*)0;
  T* lb = (T*)(uintptr_t)(256 << 10);
  asc_set_gm2l1_nz_para(1, 1, mb * 16, 0);
  asc_copy_gm2l1_nd2nz(la, a, k * sizeof(T), kLoad, m, k, 0, 0);
  int b_rows = nn ? k : n;
  asc_set_gm2l1_nz_para(1, 1, (b_rows + 15) / 16 * 16, 0);
  asc_copy_gm2l1_nd2nz(lb, b, (nn ? n : k) * sizeof(T), kLoad, b_rows, nn ? n : k, 0, 0);
  asc_sync_notify(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
  if (fault != 1) asc_sync_wait(PIPE_MTE2, PIPE_MTE1, static_cast<event_t>(0));
  int part = kb / steps;
  for (int s = 0; s < steps; ++s) {
    if (fault != 2) asc_lock(PIPE_MTE1, 0);
    asc_copy_l12l0a((T*)0, la, 0, s * part, mb, part, mb, mb);
    if (nn) {
      asc_copy_l12l0b_transpose((T*)0, lb, s * part * kRow / 16, 0, part * kRow / 16, (n + kRow - 1) / kRow,
                                (k + 15) / 16, nb);
    } else {
      asc_copy_l12l0b((T*)0, lb, 0, s * part, nb, part, nb, nb);
    }
    if (fault != 2) asc_unlock(PIPE_MTE1, 0);
    if (fault != 2) asc_lock(PIPE_M, 0);
    int terms = steps == 1 ? k : part * kRow;
    asc_mmad((float*)0, (T*)0, (T*)0, m, terms, n, fault == 10 ? (s + 1 == steps ? 3 : 2) : 0, 1, 0,
             s == 0 && fault != 3);
    if (fault != 2) asc_unlock(PIPE_M, 0);
  }
  int unit = fault == 10 || fault == 11 ? 3 : 0;
  if (unit == 0) asc_sync_notify(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
  if (unit == 0 && fault != 4) asc_sync_wait(PIPE_M, PIPE_FIX, static_cast<event_t>(0));
  if (fault == 4) quant = 7;
  asc_set_l0c_copy_nz_para(1, 0, 0);
  asc_copy_l0c2gm(c, (float*)0, n, fault == 5 ? m + 1 : m, n, mb * 16, kStore,
                  static_cast<asc_unit_flag_mode>(unit), static_cast<asc_quant_mode>(quant),
                  static_cast<asc_relu_pre_mode>(relu), 0, 1, 0, 0);
  if (fault == 6) asc_lock(PIPE_M, 0);
  if (fault == 7) asc_unlock(PIPE_MTE1, 0);
  if (fault == 8) asc_copy_l12l0a((T*)(uintptr_t)(64 << 10), la, 0, 0, 1, 1, 1, 1);
  if (fault == 9) asc_copy_gm2ub_align((uint8_t*)0, (uint8_t*)a, 1, 32, 0, 0, 0, kLoad, 32, 32);
}
extern "C" __global__ __cube__ void of_float(__gm__ float* a, __gm__ float* b, __gm__ float* c, int32_t m, int32_t n,
    int32_t k, int32_t steps, int32_t nn, int32_t quant, int32_t relu, int32_t fault) {
  product(a, b, c, m, n, k, steps, nn, quant, relu, fault);
}
extern "C" __global__ __cube__ void of_bfloat16(__gm__ bfloat16_t* a, __gm__ bfloat16_t* b, __gm__ bfloat16_t* c,
    int32_t m, int32_t n, int32_t k, int32_t steps, int32_t nn, int32_t quant, int32_t relu, int32_t fault) {
  product(a, b, c, m, n, k, steps, nn, quant, relu, fault);
}
extern "C" __global__ __cube__ void of_half(__gm__ half* a, __gm__ half* b, __gm__ half* c, int32_t m, int32_t n,
    int32_t k, int32_t steps, int32_t nn, int32_t quant, int32_t relu, int32_t fault) {
  product(a, b, c, m, n, k, steps, nn, quant, relu, fault);
}
extern "C" __global__ __cube__ void of_fp8(__gm__ float8_e4m3_t* a, __gm__ float8_e4m3_t* b, __gm__ float* c,
    int32_t m, int32_t n, int32_t k, int32_t steps, int32_t nn, int32_t quant, int32_t relu, int32_t fault) {
  product(a, b, c, m, n, k, steps, nn, quant, relu, fault);
}
// One tile with scales: sa and sb are [k / 64, rows] pairs of E8M0.
template <class T>
void scaled(T* a, T* b, float* c, int16_t* sa, int16_t* sb, int m, int n, int k, int fault) {
  constexpr bool kFp4 = std::is_same_v<T, float4_e2m1x2_t>;
  int bytes = kFp4 ? k / 2 : k, mb = m / 16, nb = n / 16, kb = bytes / 32, pairs = k / 64;
  auto* la = (uint8_t*)0;
  auto* lb = (uint8_t*)(uintptr_t)(128 << 10);
  auto* lsa = (int16_t*)(uintptr_t)(384 << 10);
  auto* lsb = (int16_t*)(uintptr_t)(400 << 10);
  asc_set_gm2l1_nz_para(1, 1, m, 0);
  asc_copy_gm2l1_nd2nz((int8_t*)la, (int8_t*)a, bytes, kLoad, m, bytes, 0, 0);
  asc_set_gm2l1_nz_para(1, 1, n, 0);
  asc_copy_gm2l1_nd2nz((int8_t*)lb, (int8_t*)b, bytes, kLoad, n, bytes, 0, 0);
  asc_set_gm2l1_nz_para(1, 1, pairs, 0);
  asc_copy_gm2l1_nd2nz(lsa, sa, m * 2, kLoad, pairs, m, 0, 0);
  if (fault != 1) asc_copy_gm2l1_nd2nz(lsb, sb, n * 2, kLoad, pairs, n, 0, 0);
  asc_sync();
  asc_copy_l12l0a((T*)0, (T*)la, 0, 0, mb, kb, mb, mb);
  asc_copy_l12l0b((T*)0, (T*)lb, 0, 0, nb, kb, nb, nb);
  asc_copy_l12l0a_mx(0, (fp8_e8m0_t*)lsa, 0, 0, mb, pairs, pairs, pairs);
  asc_copy_l12l0b_mx(0, (fp8_e8m0_t*)lsb, 0, 0, nb, pairs, pairs, pairs);
  asc_sync();
  asc_mmad_mx((float*)0, (T*)0, (T*)0, m, fault == 2 ? 32 : k, n, 0, 1, 0, true);
  asc_sync();
  asc_copy_l0c2gm(c, (float*)0, n, m, n, m, kStore, static_cast<asc_unit_flag_mode>(0), static_cast<asc_quant_mode>(0),
                  static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
}
extern "C" __global__ __cube__ void mx_fp8(__gm__ float8_e4m3_t* a, __gm__ float8_e4m3_t* b, __gm__ float* c,
    __gm__ int16_t* sa, __gm__ int16_t* sb, int32_t m, int32_t n, int32_t k, int32_t fault) {
  scaled(a, b, c, sa, sb, m, n, k, fault);
}
extern "C" __global__ __cube__ void mx_fp4(__gm__ float4_e2m1x2_t* a, __gm__ float4_e2m1x2_t* b, __gm__ float* c,
    __gm__ int16_t* sa, __gm__ int16_t* sb, int32_t m, int32_t n, int32_t k, int32_t fault) {
  scaled(a, b, c, sa, sb, m, n, k, fault);
}
// L1 as bytes: what dn2nz and fill write, seen through the identity product of half.
extern "C" __global__ __cube__ void columns(__gm__ half* eye, __gm__ half* x, __gm__ float* y, int32_t rows,
                                            int32_t cols) {
  auto* lx = (half*)(uintptr_t)(256 << 10);
  asc_fill_l1((uint32_t*)lx, 0x3c003c00u, {.repeat = 1, .blk_num = 64, .dst_gap = 0});
  asc_sync();
  asc_set_gm2l1_nz_para(1, 1, 32, 0);
  asc_copy_gm2l1_dn2nz(lx, x, cols * 2, kLoad, cols, rows, 0, 0);
  asc_copy_gm2l1_nd2nz((half*)0, eye, 64, kLoad, 32, 32, 0, 0);
  asc_sync();
  asc_copy_l12l0a((half*)0, (half*)0, 0, 0, 2, 2, 2, 2);
  asc_copy_l12l0b((half*)0, lx, 0, 0, 2, 2, 2, 2);
  asc_sync();
  asc_mmad((float*)0, (half*)0, (half*)0, 32, 32, 32, 0, 1, 0, true);
  asc_sync();
  asc_copy_l0c2gm(y, (float*)0, 32, 32, 32, 32, kStore, static_cast<asc_unit_flag_mode>(0),
                  static_cast<asc_quant_mode>(0), static_cast<asc_relu_pre_mode>(0), 0, 1, 0, 0);
}
"""
KINDS = {
    "of_float": (torch.float32, torch.float32, 0),
    "of_bfloat16": (torch.bfloat16, torch.bfloat16, 16),
    "of_half": (torch.float16, torch.float16, 1),
    "of_fp8": (torch.float8_e4m3fn, torch.float32, 0),
}


def product(program, kind, m, n, k, *, steps=1, nn=0, relu=0, fault=0):
    dtype, out, quant = KINDS[kind]
    torch.manual_seed(m * 31 + n * 7 + k)
    a = torch.randn(m, k).to(dtype)
    b = torch.randn(*((k, n) if nn else (n, k))).to(dtype)
    c = torch.zeros(m, n, dtype=out)
    numbers = {"m": m, "n": n, "k": k, "steps": steps, "nn": nn, "quant": quant, "relu": relu, "fault": fault}
    report = program(SOURCE).run({"a": a, "b": b, "c": c} | numbers, cores=1, kernel=kind, undefined=["c"])
    exact = a.double() @ (b.double() if nn else b.double().T)
    exact = exact.clamp(min=0) if relu else exact
    return c, exact.to(out), exact, report


def close(c, rounded, exact, dtype):
    steps = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(c.double(), exact, atol=steps * float(exact.abs().max() + 1), rtol=steps)
    if dtype != torch.float32:  # sums in float32 round to the same value nearly always; float32 itself need not
        assert (c == rounded).float().mean() > 0.98


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(KINDS)), st.integers(1, 70), st.integers(1, 70), st.integers(1, 70))
def test_products_of_any_size(program, kind, m, n, k):
    c, rounded, exact, report = product(program, kind, m, n, k)
    close(c, rounded, exact, KINDS[kind][1])
    assert report.defined["c"].all()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_k_add_up_and_relu(program, kind):
    c, rounded, exact, _ = product(program, kind, 33, 48, 128, steps=4, relu=1)
    close(c, rounded, exact, KINDS[kind][1])
    assert (c == 0).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_transposed_operand(program, kind, steps):
    c, rounded, exact, _ = product(program, kind, 32, 96, 64, steps=steps, nn=1)
    close(c, rounded, exact, KINDS[kind][1])


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, emulate.RaceError, r"L1 byte 0: the read by pipe MTE1 .* comes after a write by pipe MTE2"),
        (2, emulate.RaceError, r"L0A byte 0: the (read|write) by pipe M"),
        (4, emulate.InstructionError, "quantisation mode 7 is not emulated"),
        (5, emulate.BoundsError, "asc_copy_l0c2gm writes tensor c bytes"),
        (6, emulate.FlagError, "at the end pipe M holds lock 0"),
        (7, emulate.FlagError, r"asc_unlock\(MTE1, 0\), line \d+: this pipe does not hold it"),
        (8, emulate.BoundsError, r"asc_copy_l12l0a writes L0A bytes \[65536"),
        (9, emulate.BoundsError, "a cube core has no unified buffer"),
    ],
)
def test_faults_are_found(program, fault, kind, text):
    with pytest.raises(kind, match=text):
        product(program, "of_half", 32, 16, 64, steps=2, fault=fault)


def test_the_unit_flag_orders_products_and_their_result(program):
    """In place of an event between M and the fixpipe; where the products do not set it there is a race."""
    c, rounded, exact, _ = product(program, "of_float", 32, 16, 64, steps=2, fault=10)
    close(c, rounded, exact, torch.float32)
    with pytest.raises(emulate.RaceError, match=r"L0C byte 0: the read by pipe FIX .* comes after a write by pipe M"):
        product(program, "of_float", 32, 16, 64, steps=2, fault=11)


def test_adding_to_an_unwritten_accumulator_is_undefined(program):
    _, _, _, report = product(program, "of_float", 16, 16, 16, fault=3)
    assert not report.defined["c"].any()


def scales(rows, k):
    e = torch.randint(120, 132, (rows, k // 32), dtype=torch.uint8)
    packed = e.view(rows, k // 64, 2).permute(1, 0, 2).contiguous().view(torch.int16).reshape(k // 64, rows)
    return torch.exp2(e.double() - 127).repeat_interleave(32, 1), packed.contiguous()


def scaled(program, kind, m, n, k, fault=0):
    (fa, pa), (fb, pb) = scales(m, k), scales(n, k)
    if kind == "mx_fp8":
        a, b = (torch.randn(r, k).to(torch.float8_e4m3fn) for r in (m, n))
        va, vb = a.double(), b.double()
    else:
        a, b = (torch.randint(0, 256, (r, k // 2), dtype=torch.int32).to(torch.uint8) for r in (m, n))
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        va, vb = (torch.stack([table[(x & 15).long()], table[(x >> 4).long()]], -1).reshape(-1, k) for x in (a, b))
    c = torch.zeros(m, n)
    given_ = {"a": a, "b": b, "c": c, "sa": pa, "sb": pb, "m": m, "n": n, "k": k, "fault": fault}
    report = program(SOURCE).run(given_, cores=1, kernel=kind, undefined=["c"])
    return c, (va * fa) @ (vb * fb).T, report


@pytest.mark.parametrize("kind", ["mx_fp8", "mx_fp4"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 64), (32, 48, 128), (128, 64, 256)])
def test_block_scaled_products(program, kind, m, n, k):
    c, expected, _ = scaled(program, kind, m, n, k)
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_missing_scales_make_columns_undefined_and_odd_k_is_refused(program):
    _, _, report = scaled(program, "mx_fp8", 16, 16, 64, fault=1)
    assert not report.defined["c"].any()
    with pytest.raises(emulate.InstructionError, match="k beyond pairs of scales"):
        scaled(program, "mx_fp8", 16, 16, 64, fault=2)


def test_columns_of_a_matrix_become_rows_and_a_fill_shows_behind(program):
    """dn2nz of [rows, cols]; what it does not write keeps the fill of ones, and the end of a block becomes zero."""
    rows, cols = 20, 9
    x = torch.randn(rows, cols).half()
    y = torch.zeros(32, 32)
    program(SOURCE).run(
        {"eye": torch.eye(32).half(), "x": x, "y": y, "rows": rows, "cols": cols}, cores=1, kernel="columns"
    )
    expected = np.ones((32, 32), np.float32)  # y[k, n] = l1[n, k]
    expected[:, :cols] = 0
    expected[:rows, :cols] = x.float().numpy()
    assert np.array_equal(y.numpy(), expected)
