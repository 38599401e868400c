// What the experts for many tokens need beside the other expert kernels' PTX.
#pragma once

#include "expert_ptx.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mega_moe::sm90 {

#if defined(__CUDACC__)

// d = A B, or d += A B: 64 x 128 x 32 in E4M3, both in shared memory.
__device__ __forceinline__ void product_e4m3_shared(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  kernel_core::wgmma::Product<128>::ss_e4m3(d, a, b, accumulate);
}

// d += A B: 64 x 256 x 16 in bfloat16, both in shared memory.
__device__ __forceinline__ void product_bf16_shared(float (&d)[128], uint64_t a, uint64_t b) {
  kernel_core::wgmma::Product<256>::ss<kernel_core::wgmma::Major::k>(d, a, b, 1);
}

// For all products but those committed last.
__device__ __forceinline__ void wait_for_earlier_products() { kernel_core::wgmma::wait<1>(); }

// Loads that stay where they are written, well before their use.
__device__ __forceinline__ uint4 load_early_16(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(from)));
  return v;
}
__device__ __forceinline__ uint32_t load_early_4(const uint8_t* from) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(from)));
  return v;
}
__device__ __forceinline__ uint2 load_early_8(const uint8_t* from) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(__cvta_generic_to_global(from)));
  return v;
}

__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

// Until all that earlier launches of the stream have written is there; the launch may have begun before.
__device__ __forceinline__ void wait_for_earlier_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_later_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#endif

}  // namespace mega_moe::sm90
