// Window prefill's own code on host threads; the tensor unit is a loop over its operands.
#include "threads.hpp"

#include "cuda/sm90/window_plan.cuh"
#include "kernel_core/cuda/wgmma.cuh"

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

namespace kernel_core::wgmma {

inline void fence() {}
inline void commit() {}
template <int Pending>
void wait() {}
template <int Count>
void pin(float (&)[Count]) {}

}  // namespace kernel_core::wgmma

namespace kernel_core::ptx {

inline void fail() { __builtin_trap(); }
inline void named_barrier_sync(int, int) { __syncthreads(); }  // all threads meet at the only one
template <int Registers>
void registers_grow() {}
template <int Registers>
void registers_shrink() {}

}  // namespace kernel_core::ptx

namespace mla_fp4::cuda::window {

namespace ptx = kernel_core::ptx;
namespace wgmma = kernel_core::wgmma;

inline void arrive_after_copies(uint32_t barrier) { ptx::mbarrier_arrive(barrier); }
inline void store_shared_1(uint32_t to, uint32_t value) { block->shared[to] = static_cast<uint8_t>(value); }
inline uint32_t load_shared_1(uint32_t from) { return block->shared[from]; }
inline void store_shared_8(uint32_t to, uint32_t a, uint32_t b) {
  const uint32_t words[2] = {a, b};
  std::memcpy(block->shared + to, words, 8);
}

// Register 2 h + r of lane 4 i + c holds columns 8 h + 2 c, + 1 of row i + 8 r of the warp's 16; a quad has all columns
// of its rows. `at(n, k)` is the address of an element of B as it were without swizzle.
template <int N, typename At>
void product(float (&d)[N / 2], const uint32_t (&a)[4], int accumulate, At at) {
  const unsigned thread = threadIdx.x, quad = thread / 4 * 4, c = thread % 4;
  std::memcpy(&block->operands[thread * 4], a, 16);
  __syncwarp();
  double rows[2][16];
  for (unsigned r = 0; r < 2; ++r)
    for (unsigned k = 0; k < 16; ++k) {
      const uint32_t word = block->operands[(quad + k % 8 / 2) * 4 + k / 8 * 2 + r];
      rows[r][k] = kernel_core::cuda::bf16_float(word >> (k % 2 * 16) & 0xFFFF);
    }
  for (unsigned i = 0; i < N / 2; ++i) {
    double sum = accumulate ? d[i] : 0;
    for (unsigned k = 0; k < 16; ++k) {
      uint16_t value;
      std::memcpy(&value, block->shared + wgmma::swizzle128_offset(at(i / 4 * 8 + 2 * c + i % 2, k)), 2);
      sum += rows[i / 2 % 2][k] * kernel_core::cuda::bf16_float(value);
    }
    d[i] = static_cast<float>(sum);
  }
  __syncwarp();
}

struct Descriptor {
  uint32_t start, leading, stride;
  explicit Descriptor(uint64_t d)
      : start((d & 0x3FFF) << 4), leading((d >> 16 & 0x3FFF) << 4), stride((d >> 32 & 0x3FFF) << 4) {}
};

inline void product_144(float (&d)[72], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  const Descriptor t(b);
  product<144>(d, a, accumulate,
               [&](unsigned n, unsigned k) { return t.start + n / 8 * t.stride + n % 8 * 128 + k * 2; });
}
inline void product_128(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  const Descriptor t(b);
  product<128>(d, a, accumulate, [&](unsigned n, unsigned k) {
    return t.start + n / 64 * t.leading + k / 8 * t.stride + k % 8 * 128 + n % 64 * 2;
  });
}

}  // namespace mla_fp4::cuda::window

#include "cuda/sm90/window_prefill.cuh"

using namespace mla_fp4::cuda;

extern "C" int window_prefill(const void* q, const uint8_t* new_rows, const uint8_t* ring, const int32_t* ring_slot,
                              const int32_t* cu_seqlens, const int64_t* start_pos, const int64_t* lower,
                              const float* sink, const float* rope, void* out, int64_t rows, int64_t heads,
                              int64_t batch, int64_t slots, int64_t ring_rows, int64_t window, float scale,
                              int64_t run_rows) {
  const WindowParams a = {.q = q,
                          .out = out,
                          .rows = rows,
                          .heads = heads,
                          .cu_seqlens = cu_seqlens,
                          .start_pos = start_pos,
                          .batch = batch,
                          .new_rows = new_rows,
                          .ring = ring,
                          .slots = slots,
                          .ring_rows = ring_rows,
                          .ring_slot = ring_slot,
                          .lower = lower,
                          .window = window,
                          .sink = sink,
                          .rope = rope,
                          .scale = scale,
                          .run_rows = run_rows};
  if (!window::window_fits(a)) return 1;
  static std::vector<uint8_t> memory(window::Config::kBytes);
  const int64_t blocks = window::run_items(rows, batch, run_rows) * (heads / window::Config::kHeads);
  for (int64_t i = 0; i < blocks; ++i) {
    std::fill(memory.begin(), memory.end(), uint8_t{0xFF});  // NaN
    run_block(window::Config::kThreads, memory.data(), static_cast<unsigned>(i), [&] { window::prefill_block(a, 0); });
  }
  return 0;
}
