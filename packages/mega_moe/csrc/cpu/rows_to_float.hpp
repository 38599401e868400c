// Weight rows to float32. Every format is exact in float32, so this is where products of all formats meet.
#pragma once

#include <algorithm>

#include "kernel_core/decode.hpp"
#include "matrix.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

namespace kc = kernel_core::KERNEL_CORE_ISA;

inline void fp8_row_to_float(const uint8_t* codes, const uint8_t* scales, float* out, int64_t k) {
  using kc::F32;
  for (int64_t begin = 0; begin < k; begin += 32) {
    const int64_t end = std::min<int64_t>(begin + 32, k);
    const F32 scale = F32::set(kc::decode_ue8m0(scales[begin / 32]));
    int64_t i = begin;
    for (; i + F32::width <= end; i += F32::width) (kc::decode_e4m3_vec(codes + i) * scale).store(out + i);
    for (; i < end; ++i) out[i] = kc::decode_e4m3(codes[i]) * kc::decode_ue8m0(scales[begin / 32]);
  }
}

inline void bf16_row_to_float(const uint16_t* in, float* out, int64_t k) {
  for (int64_t i = 0; i < k; ++i) out[i] = kc::bit_cast<float>(static_cast<uint32_t>(in[i]) << 16);
}

// Row `row` as k float32 values: a pointer into the matrix where it already is float32, else `buffer`, filled.
inline const float* row_to_float(const Matrix& w, int64_t row, float* buffer) {
  const int64_t blocks = (w.k + 31) / 32;
  switch (w.format) {
    case Format::mxfp4:
      kc::decode_mxfp4_row(static_cast<const uint8_t*>(w.data) + row * (w.k / 2), w.scale + row * blocks, buffer, w.k);
      return buffer;
    case Format::fp8:
      fp8_row_to_float(static_cast<const uint8_t*>(w.data) + row * w.k, w.scale + row / 32 * blocks, buffer, w.k);
      return buffer;
    case Format::bf16:
      bf16_row_to_float(static_cast<const uint16_t*>(w.data) + row * w.k, buffer, w.k);
      return buffer;
    case Format::f32:
      break;
  }
  return static_cast<const float*>(w.data) + row * w.k;
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
