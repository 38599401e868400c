// Streaming reads, copies and independent multiply-adds on all threads.
#include "cpu/ceilings.hpp"

#include <atomic>

#include "kernel_core/parallel.hpp"
#include "kernel_core/simd.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

namespace {
constexpr int64_t kChunk = 1 << 16;  // floats a thread takes at a time
}

// Returns a value that depends on every element, so that no read can be left out.
float read_all(const float* x, int64_t n) {
  std::atomic<float> total{0.0f};
  parallel_for((n + kChunk - 1) / kChunk, kChunk, [&](int64_t c) {
    const float* p = x + c * kChunk;
    const int64_t count = n - c * kChunk < kChunk ? n - c * kChunk : kChunk;
    constexpr int w = F32::width;
    F32 s0 = F32::zero(), s1 = s0, s2 = s0, s3 = s0;
    int64_t i = 0;
    for (; i + 4 * w <= count; i += 4 * w) {
      s0 = max(s0, F32::load(p + i));
      s1 = max(s1, F32::load(p + i + w));
      s2 = max(s2, F32::load(p + i + 2 * w));
      s3 = max(s3, F32::load(p + i + 3 * w));
    }
    const float top = reduce_max(max(max(s0, s1), max(s2, s3)));
    float seen = total.load(std::memory_order_relaxed);
    while (seen < top && !total.compare_exchange_weak(seen, top)) {
    }
  });
  return total.load();
}

void copy_all(const float* from, float* to, int64_t n) {
  parallel_for((n + kChunk - 1) / kChunk, kChunk, [&](int64_t c) {
    const int64_t count = n - c * kChunk < kChunk ? n - c * kChunk : kChunk;
    std::memcpy(to + c * kChunk, from + c * kChunk, count * sizeof(float));
  });
}

// Operations done: twelve independent chains a thread cover the latency of a multiply-add.
int64_t fma_flops(int64_t rounds, float* sink) {
  constexpr int kChains = 12;
  const int threads = omp_get_max_threads();
#pragma omp parallel num_threads(threads)
  {
    F32 chain[kChains];
    for (int c = 0; c < kChains; ++c) chain[c] = F32::set(static_cast<float>(c));
    const F32 a = F32::set(0.999999f), b = F32::set(1e-6f);
    for (int64_t r = 0; r < rounds; ++r)
      for (int c = 0; c < kChains; ++c) chain[c] = fma(chain[c], a, b);
    F32 sum = chain[0];
    for (int c = 1; c < kChains; ++c) sum = sum + chain[c];
    const float value = reduce_add(sum);
#pragma omp critical
    *sink += value;
  }
  return 2 * rounds * kChains * F32::width * threads;
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
