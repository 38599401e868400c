// Plain loops without branches, which the compiler turns into vectors of each instruction set.
#include "cpu/rows.hpp"

#include <bit>
#include <cmath>
#include <cstring>

namespace ep_comm {
namespace KERNEL_CORE_ISA {
namespace {

inline float widen(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

inline uint16_t narrow_to_even(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? (bits >> 16 | 0x0040u) : rounded);
}

// Nearest E4M3 code, ties to even, saturated; NaN is 0x7F. Below 2^-6 codes are steps of 2^-9, which adding 2^14
// rounds to in the float32 unit.
inline uint8_t e4m3(float x) {
  const uint32_t raw = std::bit_cast<uint32_t>(x);
  const float magnitude = std::fabs(x);
  const float a = magnitude < kFp8Max ? magnitude : kFp8Max;
  const uint32_t bits = std::bit_cast<uint32_t>(a);
  const uint32_t normal = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t small = std::bit_cast<uint32_t>(a + 16384.0f) & 0xFu;
  const uint32_t code = (raw >> 31 << 7) | (a < 0.015625f ? small : normal);
  return static_cast<uint8_t>(x != x ? 0x7Fu : code);
}

// The largest magnitude that is not NaN. Bits of magnitudes are in the order of their values, and a maximum of integers
// is one that compilers vectorise: of floats it would depend on the order.
inline float largest_magnitude(const float* x) {
  int32_t largest = 0;
  for (int32_t i = 0; i < kGroup; ++i) {
    const int32_t bits = std::bit_cast<int32_t>(x[i]) & 0x7FFFFFFF;
    const int32_t number = bits > 0x7F800000 ? 0 : bits;
    largest = number > largest ? number : largest;
  }
  return std::bit_cast<float>(largest);
}

void encode_groups(const float* x, uint8_t* __restrict codes, uint8_t* __restrict scales, int64_t hidden) {
  for (int64_t g = 0; g < hidden / kGroup; ++g) {
    const float* group = x + g * kGroup;
    const float scale = fp8_scale(largest_magnitude(group));
    std::memcpy(scales + 4 * g, &scale, 4);
    for (int32_t i = 0; i < kGroup; ++i) codes[g * kGroup + i] = e4m3(group[i] / scale);
  }
}

void widen_row(const uint16_t* x, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen(x[i]);
}

void copy_row(const void* x, bool narrow, uint8_t* to, bool to_narrow, int64_t n) {
  if (narrow == to_narrow) {
    std::memcpy(to, x, n * (narrow ? 2 : 4));
  } else if (narrow) {
    widen_row(static_cast<const uint16_t*>(x), reinterpret_cast<float*>(to), n);
  } else {
    const auto* from = static_cast<const float*>(x);
    auto* out = reinterpret_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; ++i) out[i] = narrow_to_even(from[i]);
  }
}

}  // namespace

void encode_row(const void* x, bool narrow, uint8_t* channels, uint8_t* scales, Format format, int64_t hidden) {
  if (format != Format::fp8) return copy_row(x, narrow, channels, format == Format::bfloat16, hidden);
  if (!narrow) return encode_groups(static_cast<const float*>(x), channels, scales, hidden);
  float group[kGroup];
  for (int64_t g = 0; g < hidden / kGroup; ++g) {
    widen_row(static_cast<const uint16_t*>(x) + g * kGroup, group, kGroup);
    encode_groups(group, channels + g * kGroup, scales + 4 * g, kGroup);
  }
}

void round_row(const void* y, bool narrow, uint8_t* to, Format format, int64_t hidden) {
  copy_row(y, narrow, to, format == Format::bfloat16, hidden);
}

void add_row(const uint8_t* row, Format format, float* sum, int64_t hidden) {
  if (format == Format::bfloat16) {
    const auto* values = reinterpret_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < hidden; ++i) sum[i] += widen(values[i]);
  } else {
    const auto* values = reinterpret_cast<const float*>(row);
    for (int64_t i = 0; i < hidden; ++i) sum[i] += values[i];
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace ep_comm
