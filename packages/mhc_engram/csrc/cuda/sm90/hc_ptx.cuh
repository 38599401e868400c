// Instructions of the hyper-connection kernel: the TF32 product and the cluster.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

namespace mhc_engram::cuda {

// d[16][8] += A[16][8] B[8][8]. Lane 4 g + c holds A(g, c), A(g + 8, c), A(g, c + 4), A(g + 8, c + 4); B(c, g),
// B(c + 4, g); d(g, 2c), d(g, 2c + 1), d(g + 8, 2c), d(g + 8, 2c + 1).
__device__ __forceinline__ void product_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ int cta_thread() { return static_cast<int>(threadIdx.x); }

// The same, read again: no register keeps it over what stands between.
__device__ __forceinline__ int cta_thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Everything before the arrival of all threads of the cluster is seen after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// For threads that have written nothing that others read: those of a release wait until memory has their stores.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The line of 128 bytes to the second-level cache.
__device__ __forceinline__ void prefetch_line(const float* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// As cp_async_16, and the line of 128 bytes around `from` to the second-level cache: warps side by side take its
// halves. Not `valid`: nothing is read or written, and `from` may be any address.
__device__ __forceinline__ void cp_async_16_of_line(uint32_t to, const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}\n" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(static_cast<uint32_t>(valid))
      : "memory");
}

// A float at the same place of shared memory in CTA `rank` of the cluster.
__device__ __forceinline__ float load_of_rank(const float* p, uint32_t rank) {
  float v;
  asm volatile(
      "{\n"
      ".reg .u32 at;\n"
      "mapa.shared::cluster.u32 at, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [at];\n"
      "}\n"
      : "=f"(v)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(rank));
  return v;
}

}  // namespace mhc_engram::cuda

#endif  // __CUDACC__
