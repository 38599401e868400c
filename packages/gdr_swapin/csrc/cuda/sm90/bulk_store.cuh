// Bulk copies from shared to global memory, in groups that one thread waits for.
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

// Until everything is written.
__device__ __forceinline__ void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace gdr_swapin::cuda

#endif  // __CUDACC__
