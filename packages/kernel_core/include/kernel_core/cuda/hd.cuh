// Functions that run on the device and, for their tests, on the host.
//
// KC_HD marks them. Every float operation that must round exactly once goes through mul_rn, add_rn, div_rn or
// sqrt_rn: nvcc may otherwise contract a product and a sum into one rounding. Host tests compile with
// -ffp-contract=off for the same reason.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KC_HD __host__ __device__ __forceinline__
#else
#include <cmath>
#define KC_HD inline
#endif

namespace kernel_core::cuda {

KC_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

KC_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

// Of x > 0.
KC_HD int floor_log2(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(static_cast<int>(x));
#else
  return 31 - __builtin_clz(x);
#endif
}

KC_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

KC_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

KC_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

KC_HD float sqrt_rn(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}

// Byte i of the result is byte (selector nibble i & 7) of the eight bytes b:a or, where the nibble's bit 3 is set, that
// byte's top bit eight times. Only the selector's low 16 bits count. One PRMT instruction; the intrinsic __byte_perm
// would mask bit 3.
KC_HD uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
#else
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    const uint32_t byte = static_cast<uint32_t>(bytes >> ((nibble & 7) * 8) & 0xFF);
    out |= (nibble & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
  }
  return out;
#endif
}

}  // namespace kernel_core::cuda
