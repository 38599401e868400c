// Bulk copies that one thread starts: from shared to global memory in groups it waits for, and a load with a cache
// hint.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

namespace gdr_swapin::cuda {

// `bytes`, a multiple of 16, as are both addresses.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the latest `Pending` groups have read their shared memory, which may then be written again.
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Until the bytes of all but the latest `Pending` groups are in memory.
template <int Pending>
__device__ __forceinline__ void bulk_wait_written_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// A load that leaves the L2 cache to others: its lines go first.
__device__ __forceinline__ void bulk_load_once(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Adds 1; who sees it, on the device or by a stream's wait, sees what this thread knew to be written.
__device__ __forceinline__ void count_up(uint32_t* counter) {
  asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(counter)) : "memory");
}

// Until everything is written.
__device__ __forceinline__ void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace gdr_swapin::cuda

#endif  // __CUDACC__
