// What row kernels share: vectors of 16 bytes, sums and copies by one warp. Device only.
#pragma once

#include <cuda_bf16.h>

#include "kernel_core/cuda/formats.cuh"

namespace kernel_core::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// N consecutive values as float32; 16-byte accesses where N allows. p is aligned to N values or 16 bytes.
template <int N>
__device__ __forceinline__ void load_values(const float* p, float (&out)[N]) {
  static_assert(N % 2 == 0);
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(p + i);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 v = *reinterpret_cast<const float2*>(p + i);
      out[i] = v.x, out[i + 1] = v.y;
    }
  }
}

template <int N>
__device__ __forceinline__ void load_values(const __nv_bfloat16* p, float (&out)[N]) {
  static_assert(N % 4 == 0);
  const auto put = [&](int at, uint32_t pair) {
    out[at] = bits_float(pair << 16), out[at + 1] = bits_float(pair & 0xFFFF0000u);
  };
  if constexpr (N % 8 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(p + i);
      put(i, v.x), put(i + 2, v.y), put(i + 4, v.z), put(i + 6, v.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint2 v = *reinterpret_cast<const uint2*>(p + i);
      put(i, v.x), put(i + 2, v.y);
    }
  }
}

// 16 bytes to global memory in one access: the compiler may split a plain store of four values into four.
__device__ __forceinline__ void store_16(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

template <int N>
__device__ __forceinline__ void store_values(float* p, const float (&x)[N]) {
  static_assert(N % 4 == 0);
#pragma unroll
  for (int i = 0; i < N; i += 4)
    store_16(p + i, float_bits(x[i]), float_bits(x[i + 1]), float_bits(x[i + 2]), float_bits(x[i + 3]));
}

template <int N>
__device__ __forceinline__ void store_values(__nv_bfloat16* p, const float (&x)[N]) {
  static_assert(N % 8 == 0);
#pragma unroll
  for (int i = 0; i < N; i += 8)
    store_16(p + i, pack_bf16(x[i], x[i + 1]), pack_bf16(x[i + 2], x[i + 3]), pack_bf16(x[i + 4], x[i + 5]),
             pack_bf16(x[i + 6], x[i + 7]));
}

// The same bits in every lane: a butterfly adds the same pairs everywhere, and a sum of two does not mind the order.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = add_rn(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

__device__ __forceinline__ int64_t warp_sum(int64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Largest of `Lanes` neighbouring lanes (a power of two), in each of them.
template <int Lanes>
__device__ __forceinline__ uint32_t lanes_max(uint32_t x) {
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// `bytes` from one place to another by one warp, in units of Unit.
template <typename Unit>
__device__ __forceinline__ void warp_copy(uint8_t* to, const uint8_t* from, int64_t bytes, int lane) {
  const auto* source = reinterpret_cast<const Unit*>(from);
  auto* target = reinterpret_cast<Unit*>(to);
  for (int64_t i = lane; i < bytes / static_cast<int64_t>(sizeof(Unit)); i += 32) target[i] = source[i];
}

// Largest power of two up to 16 that divides all sizes and addresses or-ed into `bits`.
inline int copy_unit(uint64_t bits) {
  for (int unit = 16; unit > 1; unit /= 2)
    if (bits % static_cast<uint64_t>(unit) == 0) return unit;
  return 1;
}

// f(Unit{}) with the type of `unit` bytes.
template <typename F>
auto with_copy_unit(int unit, F&& f) {
  switch (unit) {
    case 16:
      return f(uint4{});
    case 8:
      return f(uint2{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

}  // namespace kernel_core::cuda
