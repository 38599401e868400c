// Instructions of the SM100 expert kernels besides ptx.cuh and tcgen05.cuh. A test puts host functions of the same
// names in their place.
#pragma once

#include "kernel_core/cuda/ptx.cuh"
#include "kernel_core/cuda/tcgen05.cuh"

// Hints that a host compiler, which builds kernels for tests, does not know
#if defined(__CUDACC__)
#define MEGA_MOE_SM100_UNROLL _Pragma("unroll")
#define MEGA_MOE_SM100_NO_UNROLL _Pragma("unroll 1")
#else
#define MEGA_MOE_SM100_UNROLL
#define MEGA_MOE_SM100_NO_UNROLL
#endif

#if defined(__CUDACC__)

#include <cuda.h>

namespace mega_moe::sm100 {

namespace ptx = kernel_core::ptx;

__device__ __forceinline__ uint32_t shared_base() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return ptx::shared_address(memory);
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

// --- pairs; with kCtas = 1 the plain forms ---------------------------------------------------------------------------

__device__ __forceinline__ uint32_t rank_in_pair() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Everybody of both CTAs; whole warps.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the first CTA's barrier of this address.
template <int kCtas>
__device__ __forceinline__ void arrive_first(uint32_t barrier) {
  if constexpr (kCtas == 1) {
    ptx::mbarrier_arrive(barrier);
  } else {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(barrier));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
  }
}

template <int kCtas>
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  if constexpr (kCtas == 1) {
    ptx::mbarrier_wait(barrier, parity);
  } else {
    for (uint32_t polls = 0;; ++polls) {
      uint32_t done;
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
      if (done != 0) return;
      if (polls == ptx::kMaxPolls) ptx::fail();
    }
  }
}

// --- operands and products -------------------------------------------------------------------------------------------

// 128 rows of 128 columns from row `row`, column k, swizzled. Codes of four bits are padded to bytes and count at
// `barrier` without padding; what a column is stands in the map.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int k, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(k), "r"(row), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_codes(uint32_t to, const CUtensorMap& map, int k, int row, uint32_t barrier) {
  copy_tile(to, map, k, row, barrier);
}
__device__ __forceinline__ void copy_values(uint32_t to, const CUtensorMap& map, int k, int row, uint32_t barrier) {
  copy_tile(to, map, k, row, barrier);
}

// 128 scale words to four columns of tensor memory, of each CTA from its own shared memory.
template <int kCtas>
__device__ __forceinline__ void copy_scales(uint32_t to, uint64_t from) {
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
  }
}

// By one thread. K = 32.
template <int kCtas>
__device__ __forceinline__ void multiply_mx(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scales,
                                            uint32_t b_scales, bool accumulate) {
  const uint32_t more = accumulate;
  if constexpr (kCtas == 1) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%0], %1, %2, %3, [%5], [%6], p;\n}\n" ::"r"(
            d),
        "l"(a), "l"(b), "r"(kind), "r"(more), "r"(a_scales), "r"(b_scales)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.scale_vec::1X [%0], %1, %2, %3, [%5], [%6], p;\n}\n" ::"r"(
            d),
        "l"(a), "l"(b), "r"(kind), "r"(more), "r"(a_scales), "r"(b_scales)
        : "memory");
  }
}

// --- registers -------------------------------------------------------------------------------------------------------

// Two E4M3 bytes, nearest, ties to even, saturating; NaN is 0x7F.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(0xFFFFFFFF, v); }

}  // namespace mega_moe::sm100

#endif  // __CUDACC__
