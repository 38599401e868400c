// Thread blocks of SM100 on host threads, alone or in pairs: enough of the device to run the kernels' own code where
// there is no GPU. Products and copies are done by two threads of their own, in order but later than they were issued,
// so a wait that is missing or has the wrong parity shows as a wrong result or a hang.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/tcgen05.cuh"

using std::max;
using std::min;

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

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "sm100_threads: %s (thread %u)\n", what, threadIdx.x);
  std::abort();
}

struct ArrivalBarrier {
  int expected = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  std::unique_ptr<std::condition_variable> changed = std::make_unique<std::condition_variable>();
};

// std::barrier without its spinning: there are far more threads than processors.
class Meeting {
 public:
  explicit Meeting(int count) : count_(count) {}
  void arrive_and_wait() {
    std::unique_lock lock(mutex_);
    const uint32_t turn = turn_;
    if (++here_ == count_) {
      here_ = 0, ++turn_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return turn_ != turn; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int count_, here_ = 0;
  uint32_t turn_ = 0;
};

// A thread that does what it is given, in order, each a little later.
class Engine {
 public:
  Engine() : worker_([this] { run(); }) {}
  ~Engine() {
    add(nullptr);
    worker_.join();
  }
  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    some_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        some_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!work) return;
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<std::function<void()>> queue_;
  std::thread worker_;
};

struct Cta {
  static constexpr size_t kShared = 232448;
  Cta(int count, uint32_t number) : threads(count), rank(number), all(count), lanes(static_cast<size_t>(count)) {
    for (int i = 0; i < count; i += 32) warps.push_back(std::make_unique<Meeting>(32));
    shared = static_cast<uint8_t*>(std::aligned_alloc(1024, kShared));
    std::memset(shared, 0xCD, kShared);
    for (auto& lane : tmem) lane.fill(0xFFFFFFFF);  // NaN
  }
  ~Cta() { std::free(shared); }
  Cta(const Cta&) = delete;
  Cta& operator=(const Cta&) = delete;

  int threads;
  uint32_t rank;
  uint8_t* shared;
  std::array<std::array<uint32_t, 512>, 128> tmem;
  Meeting all;
  std::vector<std::unique_ptr<Meeting>> warps;
  std::vector<uint64_t> lanes;
  std::map<uint32_t, ArrivalBarrier> arrivals;  // named barriers at the top of the addresses
};

struct Group {
  Group(int count, int threads) : everybody(count * threads) {
    for (int i = 0; i < count; ++i) ctas.push_back(std::make_unique<Cta>(threads, static_cast<uint32_t>(i)));
  }
  std::vector<std::unique_ptr<Cta>> ctas;
  Meeting everybody;
  std::mutex mutex;
  Engine tensor, copies;  // first to go: they use what stands above
};
inline Group* group = nullptr;
inline thread_local Cta* me = nullptr;

template <typename Kernel>
void run_group(int count, int threads, unsigned first_index, Kernel kernel) {
  Group running(count, threads);
  group = &running;
  std::vector<std::thread> pool;
  for (int c = 0; c < count; ++c) {
    for (int i = 0; i < threads; ++i) {
      pool.emplace_back([&, c, i] {
        me = running.ctas[static_cast<size_t>(c)].get();
        threadIdx.x = static_cast<unsigned>(i);
        blockIdx.x = first_index + static_cast<unsigned>(c);
        kernel();
      });
    }
  }
  for (std::thread& thread : pool) thread.join();
}

inline void __syncthreads() { me->all.arrive_and_wait(); }
inline void __syncwarp() { me->warps[threadIdx.x / 32]->arrive_and_wait(); }

template <typename T>
T exchange(T value, int from) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  me->lanes[threadIdx.x] = bits;
  __syncwarp();
  std::memcpy(&value, &me->lanes[threadIdx.x / 32 * 32 + static_cast<unsigned>(from)], sizeof(T));
  __syncwarp();
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return exchange(value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int step) {
  return exchange(value, static_cast<int>(threadIdx.x % 32) ^ step);
}
inline uint32_t reduce(uint32_t value, bool bits) {
  me->lanes[threadIdx.x] = value;
  __syncwarp();
  uint32_t total = 0;
  for (unsigned i = 0; i < 32; ++i) {
    total += static_cast<uint32_t>(me->lanes[threadIdx.x / 32 * 32 + i]) << (bits ? i : 0);
  }
  __syncwarp();
  return total;
}
inline uint32_t __ballot_sync(unsigned, bool value) { return reduce(value, true); }
inline uint32_t __reduce_add_sync(unsigned, uint32_t value) { return reduce(value, false); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <typename T>
T __ldg(const T* at) {
  return *at;
}

// --- shared memory: an address of the own CTA, or one that address_in gave -------------------------------------------

inline uint8_t* at(uint32_t address) {
  Cta* cta = address >> 24 ? group->ctas[(address >> 24) - 1].get() : me;
  require((address & 0xFFFFFF) < Cta::kShared, "an address outside of shared memory");
  return cta->shared + (address & 0xFFFFFF);
}

inline void change(Cta* cta, uint32_t barrier, int arrivals, int64_t bytes) {
  const std::lock_guard lock(group->mutex);
  require(cta->arrivals.contains(barrier), "no barrier there");
  ArrivalBarrier& b = cta->arrivals[barrier];
  b.bytes += bytes, b.pending -= arrivals;
  require(b.pending >= 0, "one arrival too many");
  if (b.pending == 0 && b.bytes == 0) {
    b.pending = b.expected, b.phase ^= 1;
    b.changed->notify_all();
  }
}
inline void wait_for(Cta* cta, uint32_t barrier, uint32_t parity) {
  std::unique_lock lock(group->mutex);
  ArrivalBarrier& waited = cta->arrivals.at(barrier);
  const bool came = waited.changed->wait_for(lock, std::chrono::seconds(30), [&] { return waited.phase != parity; });
  if (!came) {
    for (const auto& c : group->ctas) {
      for (const auto& [where, b] : c->arrivals) {
        std::fprintf(stderr, "CTA %u barrier %u: %d of %d arrivals and %lld bytes missing, phase %u\n", c->rank, where,
                     b.pending, b.expected, static_cast<long long>(b.bytes), b.phase);
      }
    }
    std::fprintf(stderr, "CTA %u waits for barrier %u, parity %u\n", cta->rank, barrier, parity);
  }
  require(came, "a wait without end");
}

struct CUtensorMap {
  const uint8_t* base;
  int64_t rows;
  int row_bytes;
};

namespace kernel_core::ptx {

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - me->shared);
}
inline void fail() { require(false, "fail()"); }
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  const std::lock_guard lock(group->mutex);
  require(barrier % 8 == 0, "an odd address of a barrier");
  ArrivalBarrier& b = me->arrivals[barrier];
  b.expected = b.pending = static_cast<int>(arrivals);
}
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
inline void mbarrier_arrive(uint32_t barrier) { change(me, barrier, 1, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) { change(me, barrier, 1, bytes); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { wait_for(me, barrier, parity); }
// As counters that wrap: a thread that only arrives does not wait.
inline uint32_t named_arrive(uint32_t id, uint32_t threads) {
  const std::lock_guard lock(group->mutex);
  ArrivalBarrier& b = me->arrivals[~id];
  if (b.expected == 0) b.expected = b.pending = static_cast<int>(threads);
  const uint32_t phase = b.phase;
  if (--b.pending == 0) b.pending = b.expected, b.phase ^= 1, b.changed->notify_all();
  return phase;
}
inline void named_barrier_arrive(uint32_t id, uint32_t threads) { named_arrive(id, threads); }
inline void named_barrier_sync(uint32_t id, uint32_t threads) { wait_for(me, ~id, named_arrive(id, threads)); }

inline void copy(uint32_t to, const void* from, size_t bytes, bool valid) {
  if (valid) {
    std::memcpy(at(to), from, bytes);
  } else {
    std::memset(at(to), 0, bytes);
  }
}
inline void cp_async_16(uint32_t to, const void* from, bool valid = true) { copy(to, from, 16, valid); }
inline void cp_async_commit() {}
template <int Pending>
void cp_async_wait() {}
inline void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  require(to % 16 == 0 && bytes % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0, "a bulk copy's alignment");
  group->copies.add([=, cta = me] {
    std::memcpy(cta->shared + to, from, bytes);
    change(cta, barrier, 0, -static_cast<int64_t>(bytes));
  });
}
inline uint4 load_shared_16(uint32_t from) {
  uint4 v;
  std::memcpy(&v, at(from), 16);
  return v;
}
inline void store_shared_16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  std::memcpy(at(to), words, 16);
}

}  // namespace kernel_core::ptx

namespace mla_fp4::sm100 {

namespace ptx = kernel_core::ptx;

inline uint32_t rank_in_pair() { return me->rank; }
inline uint32_t address_in(uint32_t rank, uint32_t shared) { return (rank + 1) << 24 | shared; }
inline void store_cluster_16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  ptx::store_shared_16(to, a, b, c, d);
}
inline void store_cluster_2(uint32_t to, uint16_t v) { std::memcpy(at(to), &v, 2); }
inline void cluster_sync() { group->everybody.arrive_and_wait(); }
template <int kCtas>
void arrive(uint32_t barrier) {
  for (int rank = 0; rank < kCtas; ++rank) {
    change(kCtas == 1 ? me : group->ctas[static_cast<size_t>(rank)].get(), barrier, 1, 0);
  }
}
template <int kCtas>
void wait(uint32_t barrier, uint32_t parity) {
  wait_for(me, barrier, parity);
}
template <int kCtas>
void fence_operands() {}

inline uint32_t shared_base() { return 0; }
inline uint16_t load_shared_2(uint32_t from) {
  uint16_t v;
  std::memcpy(&v, at(from), 2);
  return v;
}
inline uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  std::memcpy(&v, at(from), 4);
  return v;
}
inline void store_shared_4(uint32_t to, uint32_t v) { std::memcpy(at(to), &v, 4); }
inline void cp_async_4(uint32_t to, const void* from, bool valid) { ptx::copy(to, from, 4, valid); }
inline void gather_rows(uint32_t to, const CUtensorMap& map, int r0, int r1, int r2, int r3, uint32_t barrier) {
  require(to % 128 == 0, "a gather's alignment");
  group->copies.add([=, &map, cta = me] {
    const int rows[4] = {r0, r1, r2, r3};
    for (int i = 0; i < 4; ++i) {
      require(rows[i] >= 0 && rows[i] < map.rows, "a gathered row outside of the map");
      std::memcpy(cta->shared + to + i * map.row_bytes, map.base + int64_t{rows[i]} * map.row_bytes,
                  static_cast<size_t>(map.row_bytes));
    }
    change(cta, barrier, 0, -4 * int64_t{map.row_bytes});
  });
}
inline uint32_t pack_bf16(float low, float high) {
  const auto bits = [](float x) {
    const uint32_t b = kernel_core::cuda::float_bits(x);
    return x != x ? 0x7FC0u : (b + 0x7FFF + (b >> 16 & 1)) >> 16;
  };
  return bits(low) | bits(high) << 16;
}

}  // namespace mla_fp4::sm100
