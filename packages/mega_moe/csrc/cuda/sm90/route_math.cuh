// Scores of the router, and keys that order like them.
#pragma once

#include "kernel_core/cuda/hd.cuh"

namespace mega_moe::cuda {

using namespace kernel_core::cuda;

// 1 / x within one unit of the last place, and a root within two, in one instruction; x is normal and positive.
KC_HD float quick_inverse(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}
KC_HD float quick_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::sqrt(x);
#endif
}

// sqrt(log(1 + e^x)) without overflow for large x and without underflow for very negative x.
//
// With w = e^(-|x|/2), z = w^2 and log(1 + z) = z q: sqrt(x + z q) for x >= 0, w sqrt(q) below. q comes from
// log(1 + z) = 2 atanh(s), s = z / (2 + z) <= 1/3.
KC_HD float sqrt_softplus(float x) {
  const float magnitude = bits_float(float_bits(x) & 0x7FFFFFFF);
  const float w = expf(-0.5f * magnitude), z = w * w;
  const float r = quick_inverse(z + 2.0f), s = z * r, s2 = s * s;
  float p = 0.14087329f;  // atanh(s) / s within 1e-8 for s2 up to 1/9
  p = fmaf(p, s2, 0.13980709f);
  p = fmaf(p, s2, 0.20012427f);
  p = fmaf(p, s2, 0.33333158f);
  p = fmaf(p, s2, 1.0f);
  const float q = (r + r) * p;
  const float root = quick_sqrt(x >= 0 ? fmaf(z, q, magnitude) : q);
  return x >= 0 ? root : w * root;
}

// Orders like the floats, NaN like -inf; above 0, which stands for no expert.
KC_HD uint32_t order_key(float x) {
  const float value = add_rn(fmaxf(x, bits_float(0xFF800000u)), 0.0f);  // -0 becomes 0
  const uint32_t bits = float_bits(value);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

}  // namespace mega_moe::cuda
