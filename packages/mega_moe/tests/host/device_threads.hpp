// A grid of CTAs on one host thread: every device thread is a context that runs until it has to wait, so that a
// deadlock is seen as such. Who goes first, whether copies land and products happen at once or late, follows from a
// number: the same number, the same run. Late products read operands from registers and shared memory when they are
// waited for, as late as the device may. Memory is otherwise sequentially consistent.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp refuses other stacks

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wclobbered"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/wgmma.cuh"

using std::max;
using std::min;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, gridDim;

namespace emulation {

// Threads that meet: `turn` counts how often they have. What they bring is kept for one more turn.
struct Meeting {
  int count = 0, here = 0;
  uint32_t turn = 0;
};
struct ArrivalBarrier {
  uint32_t expected, pending, phase;
  int64_t bytes = 0;  // announced and not yet here
};
struct Warp {
  Meeting meeting;
  uint64_t lanes[2][32];
};
struct Cta {
  unsigned index, grid;
  std::vector<uint8_t> memory;
  uint8_t* shared;  // aligned to 1024; address 0 of the space
  size_t bytes;
  std::vector<Warp> warps;
  std::map<uint32_t, Meeting> named;
  std::map<uint32_t, ArrivalBarrier> arrivals;
};
struct Thread {
  static constexpr size_t kStack = 48 << 10;
  Cta* cta;
  unsigned number;
  bool started = false, done = false;
  bool (*ready)(void*) = nullptr;  // null: may go on
  void* question = nullptr;
  std::string (*name)(void*) = nullptr;
  jmp_buf here;
  std::vector<std::function<void()>> products;
  std::vector<size_t> groups;  // products before the end of each committed group
  std::unique_ptr<uint8_t[]> stack{new uint8_t[kStack]};
};
struct Copy {
  Cta* cta;
  uint32_t to, bytes, barrier;
  const void* from;
};
struct Run {
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Thread> threads;
  std::vector<Copy> copies;
  bool late_copies = false, late_products = false;
  uint64_t random = 0;
  uint64_t changes = 0;  // of anything that somebody may wait for
  std::string error;
};
inline Run* running;
inline Thread* me;
inline jmp_buf scheduler;

inline uint32_t next_random() {
  running->random = running->random * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(running->random >> 33);
}

inline void leave() {
  if (_setjmp(me->here) == 0) _longjmp(scheduler, 1);
}

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  char text[200];
  va_list list;
  va_start(list, format);
  std::vsnprintf(text, sizeof(text), format, list);
  va_end(list);
  running->error = "CTA " + std::to_string(me->cta->index) + " thread " + std::to_string(me->number) + ": " + text;
  for (;;) leave();
}

// Until `ready()`; `name()` says what is missing.
template <typename Ready, typename Name>
void wait_until(Ready ready, Name name) {
  if (ready()) return;
  std::pair<Ready, Name> both(ready, name);
  me->question = &both;
  me->ready = [](void* p) { return static_cast<std::pair<Ready, Name>*>(p)->first(); };
  me->name = [](void* p) { return static_cast<std::pair<Ready, Name>*>(p)->second(); };
  leave();
  me->ready = nullptr;
}

inline void meet(Meeting& meeting, int count, const char* kind, uint32_t id) {
  if (meeting.here == 0) meeting.count = count;
  if (meeting.count != count) fail("%s %u meets %d threads and %d", kind, id, meeting.count, count);
  const uint32_t turn = meeting.turn;
  ++running->changes;
  if (++meeting.here == count) {
    meeting.here = 0, ++meeting.turn;
    return;
  }
  Meeting* m = &meeting;
  wait_until([=] { return m->turn != turn; }, [=] { return std::string(kind) + " " + std::to_string(id); });
}

inline uint8_t* at(uint32_t address, uint32_t bytes, uint32_t alignment) {
  if (address % alignment != 0) fail("shared address %u is no multiple of %u", address, alignment);
  if (address < 1024 || address + bytes > me->cta->bytes) fail("shared address %u", address);
  return me->cta->shared + address;
}
template <typename T>
T load(uint32_t from) {
  T v;
  std::memcpy(&v, at(from, sizeof(T), sizeof(T)), sizeof(T));
  return v;
}

inline void end_phase(ArrivalBarrier& b) {
  ++running->changes;
  if (b.pending == 0 && b.bytes == 0) b.pending = b.expected, b.phase ^= 1;
}
inline ArrivalBarrier& arrival_barrier(Cta* cta, uint32_t address) {
  const auto found = cta->arrivals.find(address);
  if (found == cta->arrivals.end()) fail("no mbarrier at %u", address);
  return found->second;
}
inline void land(const Copy& copy) {
  std::memcpy(copy.cta->shared + copy.to, copy.from, copy.bytes);
  ArrivalBarrier& b = arrival_barrier(copy.cta, copy.barrier);
  b.bytes -= copy.bytes;
  end_phase(b);
}

inline void start() {
  running->kernel();
  if (!me->products.empty()) fail("ends with products under way");
  me->done = true;
  ++running->changes;
  for (;;) leave();
}

inline void resume(Thread& thread) {
  me = &thread;
  threadIdx.x = thread.number, blockIdx.x = thread.cta->index;
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.here, 1);
  thread.started = true;
  static ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = thread.stack.get(), first.uc_stack.ss_size = Thread::kStack, first.uc_link = nullptr;
  makecontext(&first, start, 0);
  setcontext(&first);
}

// Who waits for what, warp by warp.
inline std::string waiting() {
  std::string text;
  for (Thread& thread : running->threads) {
    if (thread.done || thread.number % 32 != 0) continue;
    me = &thread;
    text += "\n  CTA " + std::to_string(thread.cta->index) + " warp " + std::to_string(thread.number / 32) + ": ";
    text += thread.ready ? thread.name(thread.question) : "runs";
  }
  return text;
}

inline void schedule(double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  uint64_t seen = 0;
  int quiet = 0;
  const size_t warps = running->threads.size() / 32;
  // Some numbers make some warps slow: they stand still for a while, again and again.
  const uint32_t slow = next_random() % 4;
  for (uint64_t pass = 0;; ++pass) {
    bool all_done = true;
    const size_t first = next_random() % warps;
    for (size_t i = 0; i < warps; ++i) {
      const size_t warp = (first + i) % warps;
      const bool late = slow == 1 ? warp < warps / 2 : slow == 2 ? warp >= warps / 2 : slow == 3 && warp % 8 < 4;
      const bool skip = late ? next_random() % 16 != 0 : next_random() % 8 == 0;
      const uint32_t from = next_random(), some = next_random() % 4 == 0 ? next_random() % 32 : 32;
      for (size_t lane = 0; lane < 32; ++lane) {
        Thread& thread = running->threads[warp * 32 + (from + lane) % 32];
        all_done = all_done && thread.done;
        if (thread.done || skip || lane >= some) continue;
        me = &thread;
        if (thread.ready && !thread.ready(thread.question)) continue;
        resume(thread);
        if (!running->error.empty()) return;
      }
    }
    while (!running->copies.empty() && next_random() % 2 == 0) {
      auto copy = running->copies.begin() + next_random() % running->copies.size();
      land(*copy);
      running->copies.erase(copy);
    }
    if (all_done) {
      if (!running->copies.empty()) running->error = "ends with copies under way";
      return;
    }
    quiet = running->changes == seen ? quiet + 1 : 0;
    seen = running->changes;
    if (quiet == 2000) running->error = "deadlock:" + waiting();
    if (pass % 256 == 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > seconds)
      running->error = "too slow:" + waiting();
    if (!running->error.empty()) return;
  }
}

// All CTAs at once; `grids`: as many kernels of `blocks` each, which ask cta_grid() for their number. Returns what went
// wrong.
template <typename Kernel>
std::string launch(unsigned blocks, unsigned threads, size_t bytes, uint64_t seed, double seconds, Kernel kernel,
                   unsigned grids = 1) {
  Run run;
  gridDim.x = blocks;
  run.late_copies = seed & 1, run.late_products = seed & 2;
  run.random = seed * 1000003;
  run.kernel = kernel;
  run.threads.resize(static_cast<size_t>(blocks) * grids * threads);
  for (unsigned block = 0; block < blocks * grids; ++block) {
    run.ctas.push_back(std::make_unique<Cta>());
    Cta& cta = *run.ctas.back();
    cta.index = block % blocks, cta.grid = block / blocks;
    cta.bytes = 1024 + bytes;
    cta.memory.assign(cta.bytes + 1024, 0xFF);  // NaN
    cta.shared = cta.memory.data() + (1024 - reinterpret_cast<uintptr_t>(cta.memory.data()) % 1024) % 1024;
    cta.warps.resize(threads / 32);
    for (unsigned i = 0; i < threads; ++i) run.threads[block * threads + i].cta = &cta;
    for (unsigned i = 0; i < threads; ++i) run.threads[block * threads + i].number = i;
  }
  running = &run;
  schedule(seconds);
  return run.error;
}

// All lanes' values; another call may follow at once, since two turns' are kept.
template <typename T>
const uint64_t* gather(T value) {
  Warp& warp = me->cta->warps[me->number / 32];
  uint64_t* lanes = warp.lanes[warp.meeting.turn & 1];
  lanes[me->number % 32] = 0;
  std::memcpy(&lanes[me->number % 32], &value, sizeof(T));
  meet(warp.meeting, 32, "warp", me->number / 32);
  return lanes;
}

}  // namespace emulation

inline uint8_t* emulated_shared() { return emulation::me->cta->shared + 1024; }

inline void __syncwarp() {
  using namespace emulation;
  meet(me->cta->warps[me->number / 32].meeting, 32, "warp", me->number / 32);
}
inline void __syncthreads() {
  using namespace emulation;
  meet(me->cta->named[0], static_cast<int>(me->cta->warps.size() * 32), "named barrier", 0);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  std::memcpy(&value, &emulation::gather(value)[lane & 31], sizeof(T));
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, static_cast<int>(emulation::me->number % 32) ^ step);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int from = static_cast<int>(emulation::me->number % 32) - step;
  const uint64_t* lanes = emulation::gather(value);
  if (from >= 0) std::memcpy(&value, &lanes[from], sizeof(T));
  return value;
}
inline void __threadfence() {}
inline void __threadfence_system() {}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
inline int atomicMax(int* to, int value) { return std::exchange(*to, std::max(*to, value)); }
inline int atomicAdd(int* to, int value) {
  ++emulation::running->changes;
  return std::exchange(*to, *to + value);
}

namespace kernel_core::ptx {

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - emulation::me->cta->shared);
}
inline void fail() { emulation::fail("ends itself"); }
inline void fence_barrier_init() {}
template <int Registers>
void registers_grow() {}
template <int Registers>
void registers_shrink() {}
inline void named_barrier_sync(uint32_t id, uint32_t threads) {
  emulation::meet(emulation::me->cta->named[id], static_cast<int>(threads), "named barrier", id);
}
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  emulation::at(barrier, 8, 8);
  emulation::me->cta->arrivals[barrier] = {arrivals, arrivals, 0};
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulation::ArrivalBarrier& b = emulation::arrival_barrier(emulation::me->cta, barrier);
  if (b.pending == 0) emulation::fail("one arrival too many at %u", barrier);
  b.bytes += bytes, --b.pending;
  emulation::end_phase(b);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  if (parity > 1) emulation::fail("parity %u", parity);
  const emulation::ArrivalBarrier* b = &emulation::arrival_barrier(emulation::me->cta, barrier);
  emulation::wait_until([=] { return b->phase != parity; },
                        [=] {
                          return "mbarrier at " + std::to_string(barrier) + ", parity " + std::to_string(parity) +
                                 ", " + std::to_string(b->pending) + " of " + std::to_string(b->expected) +
                                 " arrivals and " + std::to_string(b->bytes) + " bytes missing";
                        });
}
inline void cp_async_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) emulation::fail("a bulk copy's alignment");
  emulation::at(to, bytes, 16);
  const emulation::Copy copy = {emulation::me->cta, to, bytes, barrier, from};
  emulation::running->late_copies ? emulation::running->copies.push_back(copy) : emulation::land(copy);
}
inline uint4 load_shared_16(uint32_t from) { return emulation::load<uint4>(from); }

}  // namespace kernel_core::ptx

namespace kernel_core::wgmma {

inline void fence() {}
inline void commit() { emulation::me->groups.push_back(emulation::me->products.size()); }
template <int Count>
void pin(float (&)[Count]) {}
// All but the last groups; what was not committed runs with the next group.
template <int Pending>
void wait() {
  auto& products = emulation::me->products;
  auto& groups = emulation::me->groups;
  if (groups.size() > Pending) {
    const size_t done = groups.size() - Pending, count = groups[done - 1];
    for (size_t i = 0; i < count; ++i) products[i]();
    products.erase(products.begin(), products.begin() + static_cast<std::ptrdiff_t>(count));
    groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(done));
    for (size_t& end : groups) end -= count;
  }
  // A warp waits as one: no lane writes operands anew that a product of another lane has yet to read.
  __syncwarp();
}

template <int N>
struct Product {
  // A in registers, 16-bit or E4M3; element k of register i of a lane by `value`. B is K-major.
  template <int kPerRegister, typename Value>
  static void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b_tile, int accumulate, Value value) {
    const uint32_t* lanes[4];
    const uint64_t* all = emulation::gather(&a[0]);
    for (uint32_t i = 0; i < 4; ++i)
      lanes[i] = reinterpret_cast<const uint32_t*>(all[emulation::me->number % 32 / 4 * 4 + i]);
    const auto start = static_cast<uint32_t>(b_tile & 0x3FFF) << 4;
    const auto stride = static_cast<uint32_t>(b_tile >> 32 & 0x3FFF) << 4;
    const uint8_t* const shared = emulation::me->cta->shared;
    const auto column = static_cast<uint32_t>(accumulator_column(static_cast<int>(emulation::me->number % 128)));
    float* const to = d;
    const auto product = [=] {
      constexpr int kStep = 8 * kPerRegister;
      float rows[2][kStep];
      for (int k = 0; k < kStep; ++k)
        for (int r = 0; r < 2; ++r)
          rows[r][k] = value(lanes[k / kPerRegister % 4][r + 2 * (k / (4 * kPerRegister))], k % kPerRegister);
      for (uint32_t n = 0; n < N / 4; ++n) {
        const uint32_t token = n / 2 * 8 + column + n % 2;
        double sums[2] = {};
        if (accumulate) sums[0] = to[n / 2 * 4 + n % 2], sums[1] = to[n / 2 * 4 + n % 2 + 2];
        for (int k = 0; k < kStep; ++k) {
          const uint32_t byte = start + token / 8 * stride + token % 8 * 128 + k * (4 / kPerRegister);
          uint32_t bits = 0;
          std::memcpy(&bits, shared + swizzle128_offset(byte), 4 / kPerRegister);
          const double b = value(bits, 0);
          for (int r = 0; r < 2; ++r) sums[r] += static_cast<double>(rows[r][k]) * b;
        }
        to[n / 2 * 4 + n % 2] = static_cast<float>(sums[0]);
        to[n / 2 * 4 + n % 2 + 2] = static_cast<float>(sums[1]);
      }
    };
    emulation::running->late_products ? emulation::me->products.push_back(product) : product();
  }
  template <Major b>
  static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b_tile, int accumulate) {
    static_assert(b == Major::k);
    run<2>(d, a, b_tile, accumulate,
           [](uint32_t word, int i) { return kernel_core::cuda::bf16_float(word >> (16 * i) & 0xFFFF); });
  }
  static void rs_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b_tile, int accumulate) {
    run<4>(d, a, b_tile, accumulate,
           [](uint32_t word, int i) { return kernel_core::cuda::e4m3_float(word >> (8 * i) & 0xFF); });
  }
};

}  // namespace kernel_core::wgmma
