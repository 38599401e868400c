// Instructions of the FP8 products: one matrix product of a warp, and the cluster.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

namespace mega_moe::cuda {

// d[16][8] += A[16][16] B[16][8] in bfloat16. Lane 4 g + c holds, as pairs, A(g, 2c), A(g + 8, 2c), A(g, 2c + 8),
// A(g + 8, 2c + 8); B(2c, g), B(2c + 8, g); and single sums d(g, 2c), d(g, 2c + 1), d(g + 8, 2c), d(g + 8, 2c + 1).
__device__ __forceinline__ void product_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes, global to shared. The second-level cache takes 256 bytes around them: a warp reads a row 64 bytes at a
// time, and memory is fastest in longer pieces.
__device__ __forceinline__ void linear_fetch(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
               : "memory");
}

__device__ __forceinline__ int linear_thread() { return static_cast<int>(threadIdx.x); }

__device__ __forceinline__ uint32_t linear_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void linear_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void linear_cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// A float at the same place of shared memory in CTA `rank` of the cluster.
__device__ __forceinline__ float linear_of_rank(uint32_t from, uint32_t rank) {
  float v;
  asm volatile(
      "{\n"
      ".reg .u32 at;\n"
      "mapa.shared::cluster.u32 at, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [at];\n"
      "}\n"
      : "=f"(v)
      : "r"(from), "r"(rank));
  return v;
}

}  // namespace mega_moe::cuda

#endif  // __CUDACC__
