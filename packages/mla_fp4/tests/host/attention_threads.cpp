// The sparse attention kernels' own code, thread by thread, on one host thread: every device thread is a context that
// runs until it has to wait. So a deadlock is seen as such, and who goes first, whether copies and products happen at
// once or only when they are waited for, follows from a number: the same number, the same run. Products refuse bytes
// whose writer has not passed a proxy fence since. Memory is otherwise sequentially consistent.
//
// The test writes attention_wide.inc and attention_narrow.inc from the kernels' files: their inline assembly becomes
// calls of the functions named ptx_..., below.
#undef _FORTIFY_SOURCE  // its longjmp refuses other stacks

#include <setjmp.h>
#include <ucontext.h>

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
#define __CUDA_ARCH_FEAT_SM90_ALL

#include "cuda/attention_params.hpp"
#include "kernel_core/cuda/formats.cuh"
#include "kernel_core/cuda/wgmma.cuh"

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, gridDim;

namespace {

constexpr uint32_t kFirstShared = 1024;

// Threads that meet: `turn` counts how often they have. What they bring is kept for one more turn.
struct Meeting {
  int count = 0, here = 0;
  uint32_t turn = 0;
  bool all[2] = {true, true};
};
struct ArrivalBarrier {
  uint32_t expected, pending, phase;
};
struct Warp {
  Meeting meeting;
  uint64_t lanes[2][32];
};
struct Cta {
  unsigned index;
  std::vector<uint8_t> shared;
  std::vector<uint8_t> unfenced;  // of each byte: 1 if products may not see it yet
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
  std::vector<std::vector<std::function<void()>>> copies{1};
  std::vector<std::vector<std::function<void()>>> products{1};  // by group; the last is not committed
  std::vector<uint8_t*> written;                                // in `unfenced`, since this thread's last fence
  std::unique_ptr<uint8_t[]> stack{new uint8_t[kStack]};
};

struct Run {
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Thread> threads;
  bool late_copies, late_products;
  uint64_t random;
  uint64_t changes = 0;  // of anything that somebody may wait for
  std::string error;
};
Run* running;
Thread* me;
jmp_buf scheduler;

uint32_t next_random() {
  running->random = running->random * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(running->random >> 33);
}

void leave() {
  if (_setjmp(me->here) == 0) _longjmp(scheduler, 1);
}

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
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

bool meet(Meeting& meeting, int count, bool mine, const char* kind, uint32_t id) {
  if (meeting.here == 0) meeting.count = count, meeting.all[meeting.turn & 1] = true;
  if (meeting.count != count) fail("%s %u meets %d threads and %d", kind, id, meeting.count, count);
  const uint32_t turn = meeting.turn;
  meeting.all[turn & 1] &= mine;
  ++running->changes;
  if (++meeting.here == count) {
    meeting.here = 0, ++meeting.turn;
  } else {
    Meeting* m = &meeting;
    wait_until([=] { return m->turn != turn; }, [=] { return std::string(kind) + " " + std::to_string(id); });
  }
  return meeting.all[turn & 1];
}

uint8_t* at(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0) fail("shared address %u is no multiple of %u", address, bytes);
  if (address < kFirstShared || address + bytes > me->cta->shared.size()) fail("shared address %u", address);
  return me->cta->shared.data() + address;
}
template <typename T>
T load(uint32_t from) {
  T v;
  std::memcpy(&v, at(from, sizeof(T)), sizeof(T));
  return v;
}
void put(uint32_t to, const void* from, uint32_t bytes) {
  std::memcpy(at(to, bytes), from, bytes);
  for (uint32_t i = 0; i < bytes; ++i) {
    uint8_t* flag = &me->cta->unfenced[to + i];
    *flag = 1;
    me->written.push_back(flag);
  }
}
template <typename T>
void store(uint32_t to, T v) {
  put(to, &v, sizeof(T));
}

void start() {
  running->kernel();
  if (me->copies.size() > 1 || !me->copies[0].empty() || me->products.size() > 1 || !me->products[0].empty())
    fail("ends with work under way");
  me->done = true;
  ++running->changes;
  for (;;) leave();
}

void resume(Thread& thread) {
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
std::string waiting() {
  std::string text;
  for (Thread& thread : running->threads) {
    if (thread.done || thread.number % 32 != 0) continue;
    me = &thread;
    text += "\n  CTA " + std::to_string(thread.cta->index) + " warp " + std::to_string(thread.number / 32) + ": ";
    text += thread.ready ? thread.name(thread.question) : "runs";
  }
  return text;
}

void schedule(double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  uint64_t seen = 0;
  int quiet = 0;
  const size_t warps = running->threads.size() / 32;
  // Some seeds make one role slow: half of the warps then stand still for a while, again and again.
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
    if (all_done) return;
    quiet = running->changes == seen ? quiet + 1 : 0;
    seen = running->changes;
    if (quiet == 2000) running->error = "deadlock:" + waiting();
    if (pass % 256 == 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > seconds)
      running->error = "too slow:" + waiting();
    if (!running->error.empty()) return;
  }
}

}  // namespace

// --- what device code calls -----------------------------------------------------------------------------------------

inline void __syncwarp() { meet(me->cta->warps[me->number / 32].meeting, 32, true, "warp", me->number / 32); }
inline void __syncthreads() {
  meet(me->cta->named[0], static_cast<int>(me->cta->warps.size() * 32), true, "named barrier", 0);
}

// All lanes' values; another call may follow at once, since two turns' are kept.
template <typename T>
const uint64_t* gather(T value) {
  Warp& warp = me->cta->warps[me->number / 32];
  uint64_t* lanes = warp.lanes[warp.meeting.turn & 1];
  lanes[me->number % 32] = 0;
  std::memcpy(&lanes[me->number % 32], &value, sizeof(T));
  __syncwarp();
  return lanes;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  std::memcpy(&value, &gather(value)[lane & 31], sizeof(T));
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, static_cast<int>(me->number % 32) ^ step);
}
inline uint32_t __ballot_sync(unsigned, bool value) {
  const uint64_t* lanes = gather(value);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(lanes[i] & 1) << i;
  return mask;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  const uint64_t* lanes = gather(value);
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<uint32_t>(lanes[i]);
  return sum;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
template <typename T>
T __ldg(const T* from) {
  return *from;
}

struct __nv_bfloat162 {
  uint32_t bits;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {kernel_core::cuda::pack_bf16(low, high)}; }
inline uint32_t __float2bfloat16_rn(float x) { return kernel_core::cuda::float_bf16(x); }
inline uint16_t __bfloat16_as_ushort(uint32_t x) { return static_cast<uint16_t>(x); }

// Inline assembly of the kernels: outputs, then inputs.
inline void ptx_ld_shared_u32(uint32_t& v, uint32_t from) { v = load<uint32_t>(from); }
inline void ptx_ld_shared_v2_u32(uint32_t& x, uint32_t& y, uint32_t from) {
  const uint2 v = load<uint2>(from);
  x = v.x, y = v.y;
}
inline void ptx_st_shared_u16(uint32_t to, uint16_t v) { store(to, v); }
inline void ptx_ld_global_nc_v4_u32(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, const uint8_t* from,
                                    uint32_t some) {
  uint32_t v[4] = {};
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("address of 16 bytes");
  if (some) std::memcpy(v, from, 16);
  x = v[0], y = v[1], z = v[2], w = v[3];
}

namespace kernel_core::ptx {
inline void prefetch_l2(const void*, uint32_t) {}

inline uint32_t shared_address(const void*) { return kFirstShared; }
inline void fail() { ::fail("ends itself"); }
inline void fence_proxy_async() {
  for (uint8_t* flag : me->written) *flag = 0;
  me->written.clear();
}
inline void fence_barrier_init() {}
template <int Registers>
void registers_grow() {}
template <int Registers>
void registers_shrink() {}

inline void named_barrier_sync(uint32_t id, uint32_t threads) {
  meet(me->cta->named[id], static_cast<int>(threads), true, "named barrier", id);
}
inline bool named_barrier_all(uint32_t id, uint32_t threads, bool mine) {
  return meet(me->cta->named[id], static_cast<int>(threads), mine, "named barrier", id);
}

inline ArrivalBarrier& arrival_barrier(uint32_t address) {
  const auto found = me->cta->arrivals.find(address);
  if (found == me->cta->arrivals.end()) ::fail("no mbarrier at %u", address);
  return found->second;
}
inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  at(barrier, 8);
  me->cta->arrivals[barrier] = {arrivals, arrivals, 0};
}
inline void mbarrier_arrive(uint32_t barrier) {
  ArrivalBarrier& b = arrival_barrier(barrier);
  ++running->changes;
  if (--b.pending == 0) b.pending = b.expected, b.phase ^= 1;
}
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) { return arrival_barrier(barrier).phase != parity; }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  if (parity > 1) ::fail("parity %u", parity);
  const ArrivalBarrier* b = &arrival_barrier(barrier);
  wait_until([=] { return b->phase != parity; },
             [=] {
               return "mbarrier at " + std::to_string(barrier) + ", parity " + std::to_string(parity) + ", " +
                      std::to_string(b->pending) + " of " + std::to_string(b->expected) + " arrivals missing";
             });
}

inline void cp_async_16(uint32_t to, const void* from, bool valid = true) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) ::fail("address of 16 bytes");
  const auto copy = [=] {
    static constexpr uint8_t kZeros[16] = {};
    put(to, valid ? from : kZeros, 16);
  };
  running->late_copies ? me->copies.back().push_back(copy) : copy();
}
inline void cp_async_commit() {
  if (running->late_copies) me->copies.emplace_back();
}
template <int Pending>
void cp_async_wait() {
  while (me->copies.size() > Pending + 1) {
    for (const auto& copy : me->copies.front()) copy();
    me->copies.erase(me->copies.begin());
  }
}

inline uint4 load_shared_16(uint32_t from) { return load<uint4>(from); }
inline uint32_t load_shared_u8(uint32_t from) { return load<uint8_t>(from); }
inline uint32_t load_shared_u16(uint32_t from) { return load<uint16_t>(from); }
inline float load_shared_f32(uint32_t from) { return load<float>(from); }
inline void store_shared_u8(uint32_t to, uint32_t v) { store(to, static_cast<uint8_t>(v)); }
inline void store_shared_f32(uint32_t to, float v) { store(to, v); }
inline void store_shared_16(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store(to, uint4{a, b, c, d});
}
// Lanes 8 m .. 8 m + 7 say where the rows of matrix m go; lane l has two values of row l / 4 of each.
inline void stmatrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t values[4] = {a, b, c, d}, lane = me->number % 32;
  const uint64_t* rows = gather(to);
  for (uint32_t m = 0; m < 4; ++m) store(static_cast<uint32_t>(rows[8 * m + lane / 4]) + lane % 4 * 4, values[m]);
}

}  // namespace kernel_core::ptx

namespace kernel_core::wgmma {

inline void fence() {}
inline void commit() { me->products.emplace_back(); }
template <int Count>
void pin(float (&)[Count]) {}
template <int Pending>
void wait() {
  while (me->products.size() > Pending + 1) {
    for (const auto& product : me->products.front()) product();
    me->products.erase(me->products.begin());
  }
}

// Element (row, k) of an operand in shared memory.
struct Operand {
  uint32_t start, leading, stride;
  bool k_major;
  Operand(uint64_t d, Major major)
      : start((d & 0x3FFF) << 4),
        leading((d >> 16 & 0x3FFF) << 4),
        stride((d >> 32 & 0x3FFF) << 4),
        k_major(major == Major::k) {}
  float value(uint32_t row, uint32_t k) const {
    const uint32_t to = k_major ? row / 8 * stride + row % 8 * 128 + k * 2
                                : row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2;
    const uint32_t from = swizzle128_offset(start + to);
    if (me->cta->unfenced[from]) fail("a product reads what was written without a fence, at %u", from);
    return kernel_core::cuda::bf16_float(load<uint16_t>(from));
  }
};

template <int N>
struct Product {
  struct Rows {
    float v[2][16];
  };
  // `rows()`: this thread's two rows of A
  template <typename GetRows>
  static void run(float (&d)[N / 2], GetRows rows, Operand b, int accumulate) {
    float* to = d;
    const auto product = [=] {
      const Rows a = rows();
      const uint32_t column = accumulator_column(static_cast<int>(me->number % 128));
      for (uint32_t n = 0; n < N / 4; ++n) {
        float values[16];
        for (uint32_t k = 0; k < 16; ++k) values[k] = b.value(n / 2 * 8 + column + n % 2, k);
        for (uint32_t r = 0; r < 2; ++r) {
          float& sum = to[n / 2 * 4 + n % 2 + 2 * r];
          double total = accumulate ? sum : 0;
          for (uint32_t k = 0; k < 16; ++k) total += static_cast<double>(a.v[r][k]) * values[k];
          sum = static_cast<float>(total);
        }
      }
    };
    running->late_products ? me->products.back().push_back(product) : product();
  }
  template <Major b, Major a = Major::k>
  static void ss(float (&d)[N / 2], uint64_t a_tile, uint64_t b_tile, int accumulate) {
    const Operand from(a_tile, a);
    const auto rows = [=] {
      const uint32_t row = accumulator_row(static_cast<int>(me->number % 128));
      Rows out;
      for (uint32_t i = 0; i < 32; ++i) out.v[i / 16][i % 16] = from.value(row + i / 16 * 8, i % 16);
      return out;
    };
    run(d, rows, Operand(b_tile, b), accumulate);
  }
  // Register r + 2 h of lane 4 i + c holds columns 8 h + 2 c, + 1 of row i + 8 r: a quad has all of its rows.
  template <Major b>
  static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b_tile, int accumulate) {
    Rows all;
    for (uint32_t i = 0; i < 4; ++i) {
      const uint64_t* lanes = gather(a[i]);
      for (uint32_t k = 0; k < 8; ++k) {
        const auto word = static_cast<uint32_t>(lanes[me->number % 32 / 4 * 4 + k / 2]);
        all.v[i % 2][i / 2 * 8 + k] = kernel_core::cuda::bf16_float(word >> (k % 2 * 16) & 0xFFFF);
      }
    }
    run(d, [all] { return all; }, Operand(b_tile, b), accumulate);
  }
};

}  // namespace kernel_core::wgmma

#include "attention_narrow.inc"
#include "attention_wide.inc"

namespace {

using namespace mla_fp4::cuda;

// One CTA after the other. Returns what went wrong.
template <typename Kernel>
std::string launch(unsigned blocks, unsigned threads, size_t bytes, uint64_t seed, double seconds, Kernel kernel) {
  std::string error;
  gridDim.x = blocks;
  for (unsigned block = 0; block < blocks && error.empty(); ++block) {
    Run run;
    run.late_copies = seed & 1, run.late_products = seed & 2;
    run.random = seed * 1000003 + block;
    run.kernel = kernel;
    run.ctas.push_back(std::make_unique<Cta>());
    Cta& cta = *run.ctas.back();
    cta.index = block;
    cta.shared.assign(kFirstShared + bytes, 0xFF);  // NaN
    cta.unfenced.assign(kFirstShared + bytes, 0);
    cta.warps.resize(threads / 32);
    run.threads.resize(threads);
    for (unsigned i = 0; i < threads; ++i) run.threads[i].cta = &cta, run.threads[i].number = i;
    running = &run;
    schedule(seconds);
    error = run.error;
  }
  return error;
}

template <int N>
std::string launch_narrow(const AttentionParams& a, unsigned blocks, uint64_t seed, double seconds) {
  using C = narrow_kernel::Config<N>;
  const auto groups = static_cast<uint32_t>((a.heads + N - 1) / N);
  const narrow_kernel::Items items = {static_cast<uint32_t>(a.rows) * groups, groups};
  return launch(blocks, C::kThreads, C::kBytes, seed, seconds,
                [&] { narrow_kernel::attention_narrow_kernel<N>(a, items); });
}

std::string launch_wide(const AttentionParams& a, unsigned blocks, uint64_t seed, double seconds) {
  using C = wide_kernel::Config;
  const auto tiles = static_cast<uint32_t>(a.heads / C::kHeads);
  const wide_kernel::Items items = {static_cast<uint32_t>(a.rows) * tiles, tiles};
  return launch(blocks, C::kThreads, C::kBytes, seed, seconds, [&] { wide_kernel::attention_wide_kernel(a, items); });
}

}  // namespace

// `pointers`: q, new_rows, ring, ring_slot, cu_seqlens, start_pos, lower, pages, block_table, indices, sink, rope, out;
// `numbers`: rows, heads, batch, slots, ring_rows, window, blocks, rows_per_block, table_width, selected.
// Returns an empty text or what went wrong.
extern "C" const char* attend(void* const* pointers, const int64_t* numbers, float scale, int heads_of_cta, int ctas,
                              uint64_t seed, double seconds) {
  AttentionParams a{};
  a.q = pointers[0], a.out = pointers[12];
  a.new_rows = static_cast<uint8_t*>(pointers[1]), a.ring = static_cast<uint8_t*>(pointers[2]);
  a.ring_slot = static_cast<int32_t*>(pointers[3]), a.cu_seqlens = static_cast<int32_t*>(pointers[4]);
  a.start_pos = static_cast<int64_t*>(pointers[5]), a.lower = static_cast<int64_t*>(pointers[6]);
  a.pages = static_cast<uint8_t*>(pointers[7]), a.block_table = static_cast<int32_t*>(pointers[8]);
  a.indices = static_cast<int32_t*>(pointers[9]);
  a.sink = static_cast<float*>(pointers[10]), a.rope = static_cast<float*>(pointers[11]);
  a.rows = numbers[0], a.heads = numbers[1], a.batch = numbers[2], a.slots = numbers[3], a.ring_rows = numbers[4];
  a.window = numbers[5], a.blocks = numbers[6], a.rows_per_block = numbers[7], a.table_width = numbers[8];
  a.selected = numbers[9], a.scale = scale;
  static std::string error;
  const auto blocks = static_cast<unsigned>(ctas);
  error = !attention_fits(a)   ? "refused"
          : heads_of_cta == 64 ? launch_wide(a, blocks, seed, seconds)
          : heads_of_cta == 32 ? launch_narrow<32>(a, blocks, seed, seconds)
          : heads_of_cta == 16 ? launch_narrow<16>(a, blocks, seed, seconds)
                               : launch_narrow<8>(a, blocks, seed, seconds);
  return error.c_str();
}
