// Engram on the float side: looked-up rows to float32, and the gated addition to the streams.
#include <algorithm>

#include "kernel_core/decode.hpp"
#include "kernel_core/parallel.hpp"
#include "mhc_engram.hpp"

namespace mhc_engram {
namespace KERNEL_CORE_ISA {
namespace {

using namespace kernel_core::KERNEL_CORE_ISA;

constexpr int W = F32::width;
constexpr int kGroup = 32;  // values under one scale

float gate(float dot) {
  const float root = std::sqrt(std::max(std::fabs(dot), 1e-6f));
  const float signed_root = dot > 0 ? root : dot < 0 ? -root : dot * 0.0f;  // NaN stays NaN
  alignas(64) float lanes[W];
  sigmoid(F32::set(signed_root)).store(lanes);
  return lanes[0];
}

void inject(const EngramInject& a, int64_t t, int64_t j) {
  const int64_t d = a.channels;
  float* x = a.streams + (t * a.n + j) * d;
  const float* key = a.kv + (t * (a.n + 1) + j) * d;
  const float* value = a.kv + (t * (a.n + 1) + a.n) * d;
  const float* weight = a.qk_weight + j * d;
  F32 dot = F32::zero(), xx = F32::zero(), kk = F32::zero();
  for (int64_t i = 0; i < d; i += W) {
    const F32 xv = F32::load(x + i), kv = F32::load(key + i);
    dot = fma(xv * F32::load(weight + i), kv, dot);
    xx = fma(xv, xv, xx);
    kk = fma(kv, kv, kk);
  }
  const float channels = static_cast<float>(d);
  const float rx = 1.0f / std::sqrt(reduce_add(xx) / channels + a.eps);
  const float rk = 1.0f / std::sqrt(reduce_add(kk) / channels + a.eps);
  const F32 g = F32::set(gate(reduce_add(dot) * rx * rk * (1.0f / std::sqrt(channels))));
  for (int64_t i = 0; i < d; i += W) fma(g, F32::load(value + i), F32::load(x + i)).store(x + i);
}

// Rows lie anywhere in a table far larger than the caches: ask for a later one while this one is decoded.
void fetch(const EngramGather& a, int64_t i) {
  if (i >= a.count || a.rows[i] < 0) return;
  const uint8_t* codes = a.table + a.rows[i] * a.dim;
  for (int64_t c = 0; c < a.dim; c += 64) __builtin_prefetch(codes + c);
  __builtin_prefetch(a.scale + a.rows[i] * (a.dim / kGroup));
}

void gather(const EngramGather& a, int64_t i) {
  float* out = a.out + i * a.dim;
  if (a.rows[i] < 0) {
    std::fill(out, out + a.dim, 0.0f);
    return;
  }
  const uint8_t* codes = a.table + a.rows[i] * a.dim;
  const uint8_t* scales = a.scale + a.rows[i] * (a.dim / kGroup);
  for (int64_t g = 0; g < a.dim / kGroup; ++g) {
    const F32 scale = F32::set(decode_ue8m0(scales[g]));
    for (int64_t c = g * kGroup; c < (g + 1) * kGroup; c += W) (decode_e4m3_vec(codes + c) * scale).store(out + c);
  }
}

}  // namespace

void engram_inject(const EngramInject& a) {
  kernel_core::parallel_for(a.tokens * a.n, 2 * a.channels, [&](int64_t i) {
    if (!a.dead || !a.dead[i / a.n]) inject(a, i / a.n, i % a.n);
  });
}

void engram_gather(const EngramGather& a) {
  constexpr int64_t kAhead = 8, kRows = 24;  // rows of an item
  const int64_t items = (a.count + kRows - 1) / kRows;
  kernel_core::parallel_for(items, kRows * a.dim, [&](int64_t item) {
    const int64_t end = std::min(a.count, (item + 1) * kRows);
    for (int64_t i = item * kRows; i < end; ++i) {
      fetch(a, i + kAhead);
      gather(a, i);
    }
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mhc_engram
