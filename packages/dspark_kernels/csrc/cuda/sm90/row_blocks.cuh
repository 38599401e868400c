// Rows of logits in blocks of 1024: a warp holds one block, and its largest value and sums are all that later steps
// need of it. Blocks are the same for every batch, and what is summed over them is summed in order.
#pragma once

#include "cuda/sm90/unroll.cuh"
#include "kernel_core/cuda/hd.cuh"

namespace dspark_kernels::cuda {

using kernel_core::cuda::bits_float;
using kernel_core::cuda::float_bits;

constexpr int kBlock = 1024, kChunks = 8, kLaneValues = 32;
constexpr int kMostBlocks = 1024;  // of a row: shared memory holds a number for each
constexpr unsigned kLanes = 0xFFFFFFFFu;

KC_HD float infinity() { return bits_float(0x7F800000u); }
KC_HD float nan_value() { return bits_float(0x7FC00000u); }

// e^x for x <= 0 within some units of the last place, 0 where that would be subnormal
KC_HD float quick_exp(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
#else
  return x < -87.336544f ? 0.0f : std::exp(x);
#endif
}

// Bits that order as the numbers do, 0 and -0 alike, and back
KC_HD uint32_t ordered_bits(float x) {
  const uint32_t bits = float_bits(x + 0.0f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
KC_HD float ordered_value(uint32_t ordered) {
  return bits_float(ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered);
}

// Larger for larger values, and for lower ids among equals; never 0.
KC_HD uint64_t order_key(float x, int64_t id) {
  return static_cast<uint64_t>(ordered_bits(x)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
KC_HD float key_value(uint64_t key) { return ordered_value(static_cast<uint32_t>(key >> 32)); }

// Of a block: its largest value; the sums of e^(x - top) and of e^((x - top) * factor); later the sum that a filter or
// a redraw keeps of it.
struct alignas(16) BlockStats {
  float top, sum, warm, kept;
};

struct Row {
  const float* x;
  int64_t vocab;
  int blocks;
  bool vectors;  // 16-byte loads

  KC_HD Row(const float* at, int64_t tokens)
      : x(at), vocab(tokens), blocks(static_cast<int>((tokens + kBlock - 1) / kBlock)), vectors(false) {
    vectors = tokens % 4 == 0 && reinterpret_cast<uintptr_t>(at) % 16 == 0;
  }
  // Token of value 4 * c + e of a lane
  KC_HD static int64_t first(int block, int c, int lane) {
    return static_cast<int64_t>(block) * kBlock + c * 128 + 4 * lane;
  }
};

__device__ __forceinline__ float4 stream_4(const float* p) {
#if defined(__CUDA_ARCH__)
  return __ldcs(reinterpret_cast<const float4*>(p));
#else
  return *reinterpret_cast<const float4*>(p);
#endif
}

// Values of a warp's block from chunk `from` on, -inf behind the end of the row
template <int Values>
__device__ __forceinline__ void load_chunks(const Row& row, int block, int from, int lane, float (&out)[Values]) {
  DSPARK_UNROLL
  for (int c = 0; c < Values / 4; ++c) {
    const int64_t at = Row::first(block, from + c, lane);
    float4 v = {-infinity(), -infinity(), -infinity(), -infinity()};
    if (row.vectors) {
      if (at < row.vocab) v = stream_4(row.x + at);
    } else {
      if (at < row.vocab) v.x = row.x[at];
      if (at + 1 < row.vocab) v.y = row.x[at + 1];
      if (at + 2 < row.vocab) v.z = row.x[at + 2];
      if (at + 3 < row.vocab) v.w = row.x[at + 3];
    }
    out[4 * c] = v.x, out[4 * c + 1] = v.y, out[4 * c + 2] = v.z, out[4 * c + 3] = v.w;
  }
}

__device__ __forceinline__ void load_block(const Row& row, int block, int lane, float (&out)[kLaneValues]) {
  load_chunks(row, block, 0, lane, out);
}

__device__ __forceinline__ void store_block(const Row& row, float* to, int block, int lane,
                                            const float (&x)[kLaneValues]) {
  DSPARK_UNROLL
  for (int c = 0; c < kChunks; ++c) {
    const int64_t at = Row::first(block, c, lane);
    if (row.vectors) {
      if (at < row.vocab) *reinterpret_cast<float4*>(to + at) = {x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]};
    } else {
      DSPARK_UNROLL
      for (int e = 0; e < 4; ++e)
        if (at + e < row.vocab) to[at + e] = x[4 * c + e];
    }
  }
}

// What another block of this launch wrote, after arrive_last
template <typename T>
__device__ __forceinline__ T fresh(const T* p) {
#if defined(__CUDA_ARCH__)
  return __ldcg(p);
#else
  return *p;
#endif
}

// Into the second-level cache
template <typename T>
__device__ __forceinline__ void prefetch(const T* p) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
  static_cast<void>(p);
#endif
}

__device__ __forceinline__ float warp_add(float x) {
  DSPARK_UNROLL
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kLanes, x, step);
  return x;
}
__device__ __forceinline__ double warp_add(double x) {
  DSPARK_UNROLL
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kLanes, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  DSPARK_UNROLL
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kLanes, x, step));
  return x;
}
// Sum up to and with the own lane
template <typename T>
__device__ __forceinline__ T warp_scan(T x, int lane) {
  DSPARK_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kLanes, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// In every lane. A NaN anywhere makes both sums NaN, and so does +inf.
__device__ __forceinline__ BlockStats block_stats(const float (&x)[kLaneValues], float factor) {
  float top = -infinity();
  DSPARK_UNROLL
  for (int i = 0; i < kLaneValues; ++i) top = fmaxf(top, x[i]);
  top = warp_max(top);
  float sum = 0, warm = 0;
  if (top == -infinity()) {
    DSPARK_UNROLL
    for (int i = 0; i < kLaneValues; ++i) sum += x[i] != x[i] ? x[i] : 0.0f;
    sum = warm = warp_add(sum);
  } else {
    DSPARK_UNROLL
    for (int i = 0; i < kLaneValues; ++i) sum += quick_exp(x[i] - top);
    sum = warm = warp_add(sum);
    if (factor != 1.0f) {
      warm = 0;
      DSPARK_UNROLL
      for (int i = 0; i < kLaneValues; ++i) warm += quick_exp((x[i] - top) * factor);
      warm = warp_add(warm);
    }
  }
  return {top, sum, warm, 0.0f};
}

}  // namespace dspark_kernels::cuda
