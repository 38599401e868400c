// Instructions of the SM100 kernels besides ptx.cuh and tcgen05.cuh. What a CTA and its partner share: barriers that
// both arrive at, addresses in the partner's shared memory; with kCtas = 1 they are the plain ones. Small accesses to
// shared memory. Copies by a tensor map. A test puts host functions of the same names in their place.
#pragma once

#include "kernel_core/cuda/ptx.cuh"

#if defined(__CUDACC__)

#include <cuda.h>

namespace mla_fp4::sm100 {

namespace ptx = kernel_core::ptx;

__device__ __forceinline__ uint32_t rank_in_pair() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t address_in(uint32_t rank, uint32_t shared) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

__device__ __forceinline__ void store_cluster_16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_cluster_2(uint32_t to, uint16_t v) {
  asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory");
}

// Everybody of both CTAs; whole warps.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// One arrival at the same barrier of every CTA of the group.
template <int kCtas>
__device__ __forceinline__ void arrive(uint32_t barrier) {
  if constexpr (kCtas == 1) {
    ptx::mbarrier_arrive(barrier);
  } else {
#pragma unroll
    for (uint32_t rank = 0; rank < kCtas; ++rank) {
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, barrier))
                   : "memory");
    }
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

// Stores to shared memory, the partner's too, before the tensor core reads them: by the writer, before it arrives.
template <int kCtas>
__device__ __forceinline__ void fence_operands() {
  if constexpr (kCtas == 1) {
    ptx::fence_proxy_async();
  } else {
    asm volatile("fence.proxy.async;" ::: "memory");
  }
}

// Shared memory by address

__device__ __forceinline__ uint32_t shared_base() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return ptx::shared_address(memory);
}
__device__ __forceinline__ uint16_t load_shared_2(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

// Four bytes, global to shared, or zeros.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
  const uint32_t bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

// Rows r0 .. r3 of the map, one after the other, to shared memory (128-byte aligned); bytes arrive at `barrier`.
__device__ __forceinline__ void gather_rows(uint32_t to, const CUtensorMap& map, int r0, int r1, int r2, int r3,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(0), "r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(barrier)
      : "memory");
}

// Two float32, rounded to bfloat16, the first in the lower half
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace mla_fp4::sm100

#endif  // __CUDACC__
