// Channels of a row in vectors of 16 bytes: to a format, and back to float32.
#pragma once

#include "cuda/sm90/unroll.cuh"
#include "include/ep_comm/layout.hpp"
#include "kernel_core/cuda/formats.cuh"

namespace ep_comm::cuda {

using kernel_core::cuda::bits_float;
using kernel_core::cuda::float_bits;

template <Format F>
constexpr int kChannels = F == Format::float32    ? 4
                          : F == Format::bfloat16 ? 8
                                                  : 16;  // in 16 bytes

__device__ __forceinline__ void widen(uint32_t pair, float* to) {
  to[0] = bits_float(pair << 16), to[1] = bits_float(pair & 0xFFFF0000u);
}

// N channels from channel `at` on of float32 or, `narrow`, bfloat16 values.
template <int N>
__device__ __forceinline__ void load_channels(const void* from, bool narrow, int64_t at, float (&v)[N]) {
  if (!narrow) {
    const auto* p = reinterpret_cast<const uint4*>(static_cast<const float*>(from) + at);
    EP_COMM_UNROLL
    for (int i = 0; i < N / 4; ++i) {
      const uint4 w = p[i];
      v[4 * i] = bits_float(w.x), v[4 * i + 1] = bits_float(w.y);
      v[4 * i + 2] = bits_float(w.z), v[4 * i + 3] = bits_float(w.w);
    }
  } else if constexpr (N == 4) {
    const uint2 w = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at);
    widen(w.x, v), widen(w.y, v + 2);
  } else {
    const auto* p = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at);
    EP_COMM_UNROLL
    for (int i = 0; i < N / 8; ++i) {
      const uint4 w = p[i];
      widen(w.x, v + 8 * i), widen(w.y, v + 8 * i + 2), widen(w.z, v + 8 * i + 4), widen(w.w, v + 8 * i + 6);
    }
  }
}

// Four codes, the first in the lowest byte. |x| may be slightly above 448: it saturates; NaN is 0x7F.
__device__ __forceinline__ uint32_t pack_e4m3(const float* x) {
#if defined(__CUDA_ARCH__)
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  return low | static_cast<uint32_t>(high) << 16;
#else
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const float a = x[i] > kFp8Max ? kFp8Max : x[i] < -kFp8Max ? -kFp8Max : x[i];
    word |= kernel_core::cuda::encode_e4m3(a) << (8 * i);
  }
  return word;
#endif
}

// The vector of `v`. Format fp8: eight neighbouring lanes hold a group, all of the warp call; `scale` is the group's.
template <Format F>
__device__ __forceinline__ uint4 encode(float (&v)[kChannels<F>], float& scale) {
  if constexpr (F == Format::float32) {
    return uint4{float_bits(v[0]), float_bits(v[1]), float_bits(v[2]), float_bits(v[3])};
  } else if constexpr (F == Format::bfloat16) {
    using kernel_core::cuda::pack_bf16;
    return uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
  } else {
    float largest = 0.0f;
    EP_COMM_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float a = v[i] < 0.0f ? -v[i] : v[i];
      largest = a > largest ? a : largest;  // false for NaN
    }
    EP_COMM_UNROLL
    for (int step = 4; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, step);
      largest = other > largest ? other : largest;
    }
    scale = fp8_scale(largest);
    EP_COMM_UNROLL
    for (int i = 0; i < 16; ++i) v[i] = kernel_core::cuda::div_rn(v[i], scale);
    return uint4{pack_e4m3(v), pack_e4m3(v + 4), pack_e4m3(v + 8), pack_e4m3(v + 12)};
  }
}

// sum += the vector's channels, float32 or bfloat16.
template <Format F>
__device__ __forceinline__ void add_channels(const uint4& w, float (&sum)[kChannels<F>]) {
  float v[kChannels<F>];
  if constexpr (F == Format::float32) {
    v[0] = bits_float(w.x), v[1] = bits_float(w.y), v[2] = bits_float(w.z), v[3] = bits_float(w.w);
  } else {
    widen(w.x, v), widen(w.y, v + 2), widen(w.z, v + 4), widen(w.w, v + 6);
  }
  EP_COMM_UNROLL
  for (int i = 0; i < kChannels<F>; ++i) sum[i] = kernel_core::cuda::add_rn(sum[i], v[i]);
}

}  // namespace ep_comm::cuda
