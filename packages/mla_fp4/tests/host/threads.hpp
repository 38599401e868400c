// A thread block on host threads: enough of CUDA's device side to run a kernel's own code, slowly, where there is no
// GPU. Copies finish at once, so it shows wrong indices and barriers that are missing altogether, not races.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx{0}, blockIdx{0};

struct ArrivalBarrier {
  int expected = 0, pending = 0;
  int64_t bytes = 0;  // announced and not yet here
  uint32_t phase = 0;
};

// What the threads of the running block share.
struct Block {
  explicit Block(int threads, uint8_t* memory) : shared(memory), all(threads), lanes(static_cast<size_t>(threads)) {
    for (int i = 0; i < threads; i += 32) warps.push_back(std::make_unique<std::barrier<>>(32));
    for (int i = 0; i < threads; i += 128) groups.push_back(std::make_unique<std::barrier<>>(128));
    operands.resize(static_cast<size_t>(threads) * 4);
  }
  uint8_t* shared;
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps, groups;
  std::vector<uint64_t> lanes;
  std::vector<uint32_t> operands;
  std::atomic<int> any{0};
  std::mutex mutex;
  std::map<uint32_t, ArrivalBarrier> arrivals;
};
inline Block* block = nullptr;

template <typename Kernel>
void run_block(int threads, uint8_t* shared, unsigned index, Kernel kernel) {
  Block running(threads, shared);
  block = &running;
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i)
    pool.emplace_back([&, i] {
      threadIdx.x = static_cast<unsigned>(i);
      blockIdx.x = index;
      kernel();
    });
  for (std::thread& thread : pool) thread.join();
}

inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void __syncwarp() { block->warps[threadIdx.x / 32]->arrive_and_wait(); }
inline void sync_warpgroup() { block->groups[threadIdx.x / 128]->arrive_and_wait(); }

inline int __syncthreads_or(int value) {
  if (value) block->any = 1;
  __syncthreads();
  const int result = block->any;
  __syncthreads();
  if (threadIdx.x == 0) block->any = 0;
  __syncthreads();
  return result;
}

// The value of lane `from`; a lane outside of the warp leaves the own one.
template <typename T>
T exchange(T value, int from) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  block->lanes[threadIdx.x] = bits;
  __syncwarp();
  if (from >= 0 && from < 32)
    std::memcpy(&value, &block->lanes[threadIdx.x / 32 * 32 + static_cast<unsigned>(from)], sizeof(T));
  __syncwarp();
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return exchange(value, lane);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  return exchange(value, static_cast<int>(threadIdx.x % 32) - step);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int step) {
  return exchange(value, static_cast<int>(threadIdx.x % 32) ^ step);
}
inline uint32_t __ballot_sync(unsigned, bool value) {
  block->lanes[threadIdx.x] = value;
  __syncwarp();
  uint32_t mask = 0;
  for (unsigned i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(block->lanes[threadIdx.x / 32 * 32 + i]) << i;
  __syncwarp();
  return mask;
}
inline bool __any_sync(unsigned mask, uint32_t value) { return __ballot_sync(mask, value != 0) != 0; }

template <typename T, typename F>
T reduce(T value, F f) {
  for (int step = 1; step < 32; step *= 2) value = f(value, exchange(value, static_cast<int>(threadIdx.x % 32) ^ step));
  return value;
}
inline int __reduce_add_sync(unsigned, int value) {
  return reduce(value, [](int a, int b) { return a + b; });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return reduce(value, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return reduce(value, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

inline uint32_t atomicOr(uint32_t* to, uint32_t value) { return __atomic_fetch_or(to, value, __ATOMIC_SEQ_CST); }
inline int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline void __trap() { __builtin_trap(); }

namespace kernel_core::ptx {

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - block->shared);
}
inline void copy(uint32_t to, const void* from, size_t bytes, bool valid) {
  if (valid)
    std::memcpy(block->shared + to, from, bytes);
  else
    std::memset(block->shared + to, 0, bytes);
}
inline void cp_async_16(uint32_t to, const void* from, bool valid = true) { copy(to, from, 16, valid); }
inline void cp_async_commit() {}
template <int Pending>
void cp_async_wait() {}
inline void fence_proxy_async() {}
inline void fence_barrier_init() {}

inline uint4 load_shared_16(uint32_t from) {
  uint4 v;
  std::memcpy(&v, block->shared + from, 16);
  return v;
}

// Arrivals and bytes of a barrier; its phase ends when none of either is missing.
inline void change(uint32_t barrier, int arrivals, int64_t bytes) {
  const std::lock_guard lock(block->mutex);
  ArrivalBarrier& b = block->arrivals.at(barrier);
  b.bytes += bytes, b.pending -= arrivals;
  if (b.pending == 0 && b.bytes == 0) b.pending = b.expected, b.phase ^= 1;
}
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  const std::lock_guard lock(block->mutex);
  block->arrivals[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals)};
}
inline void mbarrier_arrive(uint32_t barrier) { change(barrier, 1, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) { change(barrier, 1, bytes); }
inline void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) __trap();
  copy(to, from, bytes, true);
  change(barrier, 0, -static_cast<int64_t>(bytes));
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  for (;;) {
    {
      const std::lock_guard lock(block->mutex);
      if (block->arrivals.at(barrier).phase != parity) return;
    }
    std::this_thread::yield();
  }
}

}  // namespace kernel_core::ptx
