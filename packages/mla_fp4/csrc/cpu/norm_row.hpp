// One row: RMSNorm, rotation, bfloat16 rounding. Shared by the ops that fuse them.
#pragma once

#include "kernel_core/simd.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

using namespace kernel_core::KERNEL_CORE_ISA;

// out = x / sqrt(mean(x^2) + eps) * weight; a null weight copies. `out` may be `x`.
inline void norm_row(const float* x, const float* weight, float eps, float* out, int64_t d) {
  constexpr int w = F32::width;
  if (!weight) {
    if (out != x) std::memcpy(out, x, static_cast<size_t>(d) * sizeof(float));
    return;
  }
  const float factor = 1.0f / std::sqrt(dot(x, x, d) / static_cast<float>(d) + eps);
  const F32 f = F32::set(factor);
  for (int64_t i = 0; i < d; i += w) {
    const int n = static_cast<int>(d - i < w ? d - i : w);
    (F32::load_n(x + i, n) * f * F32::load_n(weight + i, n)).store_n(out + i, n);
  }
}

// Adjacent pairs (a, b) -> (a cos - b sin, a sin + b cos) in place; `inverse` turns the other way.
inline void rotate_row(float* x, const float* angles, int64_t rope_dim, bool inverse) {
  const int64_t half = rope_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float c = angles[i], s = inverse ? -angles[half + i] : angles[half + i];
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = a * s + b * c;
  }
}

inline float to_bf16(float f) {
  uint32_t bits = bit_cast<uint32_t>(f);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return f;  // NaN stays
  bits += 0x7FFF + (bits >> 16 & 1);
  return bit_cast<float>(bits & 0xFFFF0000u);
}

inline void round_row_bf16(float* x, int64_t d) {
  for (int64_t i = 0; i < d; ++i) x[i] = to_bf16(x[i]);
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
