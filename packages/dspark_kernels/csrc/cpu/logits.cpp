// The most likely tokens of a row with their log-probabilities, and grammar masks.
#include "dspark_kernels.hpp"
#include "row.hpp"

#if defined(KERNEL_CORE_ISA_avx512)
#include <immintrin.h>
#endif

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {
namespace {

void top_row(const TopLogprobs& a, int64_t t) {
  thread_local std::vector<int32_t> ids;
  thread_local std::vector<float> values;
  thread_local std::vector<uint64_t> keys;
  const float* logits = a.logits + t * a.vocab;
  int64_t* out_ids = a.ids + t * a.k;
  float* out = a.logprobs + t * a.k;
  const Row row(logits, a.vocab);
  const bool usable = row.usable();
  int64_t found = 0;
  if (usable) {
    const int64_t count = row.collect(row.reached_by(a.k), ids, values);
    keys.resize(count);
    for (int64_t i = 0; i < count; ++i) keys[i] = order_key(values[i], ids[i]);
    found = std::min(a.k, count);
    std::partial_sort(keys.begin(), keys.begin() + found, keys.end(), std::greater<uint64_t>());
    for (int64_t i = 0; i < found; ++i) {
      out_ids[i] = 0xFFFFFFFFu - static_cast<uint32_t>(keys[i]);
      out[i] = static_cast<float>(row.logprob(logits[out_ids[i]]));
    }
  }
  for (int64_t i = found; i < a.k; ++i) {
    out_ids[i] = -1;
    out[i] = usable ? -kInfinity : std::numeric_limits<float>::quiet_NaN();
  }
}

void mask_word(float* x, uint32_t allowed, int64_t n) {
  if (n < 32) allowed |= ~uint32_t{0} << n;  // nothing is written beyond the row
  if (allowed == ~uint32_t{0}) return;
#if defined(KERNEL_CORE_ISA_avx512)
  const __m512 minus = _mm512_set1_ps(-kInfinity);
  _mm512_mask_storeu_ps(x, static_cast<__mmask16>(~allowed), minus);
  _mm512_mask_storeu_ps(x + 16, static_cast<__mmask16>(~allowed >> 16), minus);
#else
  for (uint32_t banned = ~allowed; banned; banned &= banned - 1) x[__builtin_ctz(banned)] = -kInfinity;
#endif
}

}  // namespace

void top_logprobs(const TopLogprobs& a) {
  kernel_core::parallel_for(a.tokens, 8 * a.vocab, [&](int64_t t) { top_row(a, t); });
}

void token_mask(const TokenMask& a) {
  kernel_core::parallel_for(a.count, a.vocab / 4, [&](int64_t i) {
    if (a.rows && a.rows[i] < 0) return;
    float* row = a.logits + (a.rows ? a.rows[i] : i) * a.vocab;
    const int32_t* mask = a.bitmask + i * a.words;
    for (int64_t w = 0; w < a.words; ++w)
      mask_word(row + 32 * w, static_cast<uint32_t>(mask[w]), std::min<int64_t>(32, a.vocab - 32 * w));
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
