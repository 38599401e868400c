// What the expert kernels need beside kernel_core's PTX: counters in global memory that CTAs wait for.
#pragma once

#include "kernel_core/cuda/ptx.cuh"

// Hints and names that a host compiler, which builds kernels for tests, does not know.
#if defined(__CUDACC__)
#define MEGA_MOE_UNROLL _Pragma("unroll")
#define MEGA_MOE_NO_UNROLL _Pragma("unroll 1")
#define MEGA_MOE_SHARED(memory) extern __shared__ __align__(1024) uint8_t memory[]
#else
#define MEGA_MOE_UNROLL
#define MEGA_MOE_NO_UNROLL
#define MEGA_MOE_SHARED(memory) uint8_t* const memory = emulated_shared()
#endif

namespace mega_moe::sm90 {

// Where dynamic shared memory begins in a kernel without any other: behind the 1 KiB that the system keeps. As a number
// it lets descriptors be worked out in uniform registers.
inline constexpr uint32_t kFirstShared = 1024;

// Words of ExpertsParams::state. A report is (what was waited for, its target, what was seen, CTA); it stays.
enum State : int { kQueue = 0, kGathered = 1, kSecondDone = 2, kLeft = 3, kReport = 4, kEpoch = 8, kTileDone = 16 };

#if defined(__CUDACC__)

// Ordinary stores to global memory become visible to bulk copies, and the other way round.
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void count_release(int32_t* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(to)) : "memory");
}

__device__ __forceinline__ int load_acquire(const int32_t* from) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(from)) : "memory");
  return v;
}

// The same for flags that other ranks set.
__device__ __forceinline__ void store_release_system(int32_t* to, int v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(v) : "memory");
}

__device__ __forceinline__ int load_acquire_system(const int32_t* from) {
  int v;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(from)) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// A value that all lanes of the warp have, in a uniform register: a reduction's result stands there already.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_or_sync(0xFFFFFFFFu, x); }
__device__ __forceinline__ int uniform(int x) { return static_cast<int>(uniform(static_cast<uint32_t>(x))); }

// Until a counter reaches its target. Seconds without it leave a report and end every wait of the launch: the result is
// then not a number, but the device does not hang.
inline constexpr int kMostWaits = 1 << 23;

// `word` is what a report names: a counter of `state`, or for flags of rank r -1 - r.
template <typename Load>
__device__ __forceinline__ bool wait_for(Load load, int32_t* state, int word, int target) {
  for (int polls = 0; polls < kMostWaits; ++polls) {
    if (load() >= target) return true;
    if ((polls & 1023) == 1023 && load_acquire(state + kReport)) return false;
  }
  if (atomicCAS(state + kReport, 0, word + 1000) == 0) {
    state[kReport + 1] = target;
    state[kReport + 2] = load();
    state[kReport + 3] = static_cast<int>(blockIdx.x);
  }
  return false;
}

__device__ __forceinline__ bool wait_for_count(int32_t* state, int word, int target) {
  return wait_for([=] { return load_acquire(state + word); }, state, word, target);
}

__device__ __forceinline__ bool wait_for_flag(const int32_t* flags, int at, int32_t* state, int target) {
  return wait_for([=] { return load_acquire_system(flags + at); }, state, -1 - at, target);
}

#endif

}  // namespace mega_moe::sm90
