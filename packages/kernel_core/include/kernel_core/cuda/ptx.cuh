// Thin names for the PTX that kernels of SM90 and later share: barriers in shared memory, asynchronous copies, proxies.
//
// Addresses in shared memory are 32-bit (`shared_address`). Nothing here allocates, loops without a bound or prints.
#pragma once

#include <cstdint>

#include "kernel_core/cuda/hd.cuh"

#if defined(__CUDACC__)

namespace kernel_core {
namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t lane() {
  uint32_t id;
  asm("mov.u32 %0, %%laneid;" : "=r"(id));
  return id;
}

// --- mbarrier -------------------------------------------------------------------------------------------------------
// One thread initialises, then fence_barrier_init and a CTA barrier make it known to all. A waiter passes the parity of
// the phase it waits for: 0 for the first completion, then alternating. The phase before the first counts as complete,
// so waiting for parity 1 on a fresh barrier returns at once, which is how the first use of an empty buffer passes.

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once and announces `bytes` that bulk copies will bring in the same phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The same without waiting at all.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Ends the kernel with an error (illegal address). Not a trap instruction: that is an exit from whatever loop it stands
// in, and ptxas 13.0 then keeps the loop to the registers of the launch, whatever registers_grow has asked for.
__device__ __forceinline__ void fail() {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(uint64_t{0}), "r"(0) : "memory");
}

// A lost arrival ends the kernel instead of hanging the device. The bound is seconds, far above any wait that ends.
inline constexpr uint32_t kMaxPolls = 1u << 24;

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  for (uint32_t polls = 0; !mbarrier_try_wait(barrier, parity); ++polls) {
    if (polls == kMaxPolls) fail();
  }
}

// --- CTA-wide and partial barriers ----------------------------------------------------------------------------------
// Identifier 0 is __syncthreads; kernels number their own from 1. `threads` counts whole warps.

__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether `mine` was true in every thread: one answer for all.
__device__ __forceinline__ bool named_barrier_all(uint32_t id, uint32_t threads, bool mine) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.and.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return all != 0;
}

__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- copies ---------------------------------------------------------------------------------------------------------

// 16 bytes, global to shared, past L1. Not `valid`: nothing is read and 16 zeros are written; `from` still has to be an
// address of the space.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid = true) {
  const uint32_t bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Arrives at `barrier` once all copies that this thread has asked for have landed; counts as one of its arrivals.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until at most `Pending` of this thread's groups are still on their way.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// `bytes` (a multiple of 16) of contiguous memory to shared by one thread; arrives as transaction bytes at `barrier`.
__device__ __forceinline__ void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

// --- proxies, registers ---------------------------------------------------------------------------------------------

// Brings `bytes` (a multiple of 16, as is the address) to the second-level cache.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

// Ordinary stores to shared memory become visible to wgmma and bulk copies: by the writer, before it signals.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Moves registers between warpgroups. The sum over all warpgroups may not exceed what the launch gave.
template <int Registers>
__device__ __forceinline__ void registers_grow() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "setmaxnreg takes multiples of 8");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_shrink() {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "setmaxnreg takes multiples of 8");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// --- matrices of 8 x 8 16-bit values --------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// 16-byte accesses by shared address
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// and narrower ones
__device__ __forceinline__ uint32_t load_shared_u8(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_u16(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ float load_shared_f32(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_u8(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_f32(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace ptx
}  // namespace kernel_core

#endif  // __CUDACC__
