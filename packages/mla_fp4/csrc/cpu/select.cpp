// A rising threshold over a candidate list.
//
// Scores become unsigned integers of the same order. The maxima of a few thousand groups give a first threshold: the
// k-th largest maximum, which k scores reach. The scan keeps what is above a threshold, in index order. When the list
// is full, a search over the bits of its k-th largest cuts it back to k and raises the threshold. A later score equal
// to the k-th cannot displace an earlier one, so `above` is strict. Work: two passes, plus a cut for each
// (capacity - k) candidates, so linear in n for every order of the scores; for most orders there is one cut.
#include "cpu/select.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernel_core/simd.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

using namespace kernel_core::KERNEL_CORE_ISA;

namespace {

constexpr int kBlock = 64;
constexpr uint32_t kLowest = 0x007FFFFF;  // of -inf, and of NaN

// Same order as the float; both zeros are one number
inline uint32_t order(float score) {
  const uint32_t bits = bit_cast<uint32_t>(score + 0.0f);
  const uint32_t flipped = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? kLowest : flipped;
}

struct Candidates {
  std::vector<uint32_t> keys;
  std::vector<int32_t> indices;
  int64_t count = 0;
  uint32_t threshold = 0;  // below every order()

  void reset(int64_t capacity) {
    keys.resize(static_cast<size_t>(capacity + kBlock));
    indices.resize(keys.size());
    count = 0;
    threshold = 0;
  }
};

// Adds scores[begin, n) above the threshold until there are more than `capacity`; returns where it stopped. Not
// inlined, so that the list's address is an argument and not a thread-local look-up for each store.
#if defined(KERNEL_CORE_ISA_avx512)

[[gnu::noinline]] int64_t scan(Candidates& c, const float* scores, int64_t begin, int64_t n, int64_t capacity) {
  const __m512i threshold = _mm512_set1_epi32(static_cast<int>(c.threshold));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  uint32_t* keys = c.keys.data();
  int32_t* indices = c.indices.data();
  int64_t count = c.count, i = begin;
  for (; i < n && count <= capacity; i += 16) {
    const __mmask16 valid = F32::mask(static_cast<int>(std::min<int64_t>(16, n - i)));
    const __m512 score = _mm512_add_ps(_mm512_maskz_loadu_ps(valid, scores + i), _mm512_setzero_ps());
    const __m512i bits = _mm512_castps_si512(score);
    const __m512i sign = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(static_cast<int>(0x80000000)));
    const __m512i key = _mm512_mask_mov_epi32(
        _mm512_xor_si512(bits, sign), _mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q), _mm512_set1_epi32(kLowest));
    const __mmask16 taken = _mm512_mask_cmpgt_epu32_mask(valid, key, threshold);
    if (!taken) continue;
    const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi32(taken, key));  // the list has room for a whole block
    _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi32(taken, index));
    count += __builtin_popcount(taken);
  }
  c.count = count;
  return std::min(i, n);
}

#else

[[gnu::noinline]] int64_t scan(Candidates& c, const float* scores, int64_t begin, int64_t n, int64_t capacity) {
  uint32_t* keys = c.keys.data();
  int32_t* indices = c.indices.data();
  int64_t count = c.count, i = begin;
  for (; i < n && count <= capacity; i += kBlock) {
    const int size = static_cast<int>(std::min<int64_t>(kBlock, n - i));
    uint32_t block[kBlock], top = 0;
    for (int j = 0; j < size; ++j) {
      block[j] = order(scores[i + j]);
      top = std::max(top, block[j]);
    }
    if (top <= c.threshold) continue;
    for (int j = 0; j < size; ++j) {
      if (block[j] <= c.threshold) continue;
      keys[count] = block[j];
      indices[count++] = static_cast<int32_t>(i) + j;
    }
  }
  c.count = count;
  return std::min(i, n);
}

#endif

inline int64_t count_from(const uint32_t* keys, int64_t n, uint32_t bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += keys[i] >= bound;
  return count;
}

struct Bound {
  uint32_t key;
  int64_t reached;  // keys from `key` on, at least k
};

// The largest number that k of the keys reach, or a smaller one that exactly k reach. n >= k
Bound search(const uint32_t* keys, int64_t n, int64_t k) {
  uint32_t all = ~0u, any = 0;
  for (int64_t i = 0; i < n; ++i) {
    all &= keys[i];
    any |= keys[i];
  }
  Bound best{0, n};
  for (uint32_t bit = 0x80000000u; bit && best.reached != k; bit >>= 1) {
    if (all & bit) {
      best.key |= bit;  // in every key
    } else if (any & bit) {
      const int64_t more = count_from(keys, n, best.key | bit);
      if (more >= k) best = {best.key | bit, more};
    }
  }
  return best;
}

// Moves the keys above `bound` and the first `equal` ones that are equal to it to the front; returns their number.
#if defined(KERNEL_CORE_ISA_avx512)

inline int64_t keep(Candidates& c, uint32_t bound, int64_t equal) {
  uint32_t* keys = c.keys.data();
  int32_t* indices = c.indices.data();
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(bound));
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; i += 16) {
    const __mmask16 valid = F32::mask(static_cast<int>(std::min<int64_t>(16, c.count - i)));
    const __m512i key = _mm512_loadu_si512(keys + i), index = _mm512_loadu_si512(indices + i);
    uint32_t same = _mm512_mask_cmpeq_epi32_mask(valid, key, limit);
    if (equal < 16) same = _pdep_u32((1u << equal) - 1, same);  // the first ones
    equal -= __builtin_popcount(same);
    const auto taken = static_cast<__mmask16>(_mm512_mask_cmpgt_epu32_mask(valid, key, limit) | same);
    _mm512_storeu_si512(keys + kept, _mm512_maskz_compress_epi32(taken, key));  // up to i + 16, which is read
    _mm512_storeu_si512(indices + kept, _mm512_maskz_compress_epi32(taken, index));
    kept += __builtin_popcount(taken);
  }
  return kept;
}

#else

inline int64_t keep(Candidates& c, uint32_t bound, int64_t equal) {
  uint32_t* keys = c.keys.data();
  int32_t* indices = c.indices.data();
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    if (keys[i] < bound || (keys[i] == bound && equal-- <= 0)) continue;
    keys[kept] = keys[i];
    indices[kept++] = indices[i];
  }
  return kept;
}

#endif

// Keeps the k largest keys, of equal ones the earlier, in order. count > k before, == k after.
void cut(Candidates& c, int64_t k) {
  const Bound bound = search(c.keys.data(), c.count, k);
  // Of the keys equal to the bound only the first stay when more than k reach it. When exactly k do, the k-th key may
  // be above the bound: the lower threshold lets in more, never fewer.
  const bool exact = bound.reached == k;
  const int64_t above = exact || bound.key == ~0u ? 0 : count_from(c.keys.data(), c.count, bound.key + 1);
  c.count = keep(c, bound.key, k - above);
  c.threshold = exact ? bound.key - 1 : bound.key;
}

// A number that at least k of the scores reach: the k-th largest maximum of 4k groups
[[gnu::noinline]] uint32_t lower_bound(const float* scores, int64_t n, int64_t k) {
  static thread_local std::vector<float> best;
  static thread_local std::vector<uint32_t> keys;
  const int64_t groups = 4 * k;
  best.assign(static_cast<size_t>(groups), -std::numeric_limits<float>::infinity());
  keys.resize(best.size());
  float* top = best.data();
  int64_t i = 0;
  for (; i + groups <= n; i += groups)  // the rest only adds to the numbers above the bound
    for (int64_t g = 0; g < groups; ++g) top[g] = scores[i + g] > top[g] ? scores[i + g] : top[g];  // false for NaN
  for (int64_t g = 0; g < groups; ++g) keys[static_cast<size_t>(g)] = order(top[g]);
  return search(keys.data(), groups, k).key;
}

}  // namespace

int64_t select_top(const float* scores, int64_t n, int64_t k, int32_t* out) {
  if (n <= k) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int32_t>(i);
    return n;
  }
  if (k <= 0) return 0;
  static thread_local Candidates c;
  const int64_t capacity = std::max<int64_t>(4 * k, 1024);
  c.reset(capacity);
  if (n >= 8 * k) c.threshold = lower_bound(scores, n, k) - 1;
  for (int64_t i = 0; i < n;) {
    i = scan(c, scores, i, n, capacity);
    if (c.count > capacity) cut(c, k);
  }
  if (c.count > k) cut(c, k);
  std::copy_n(c.indices.data(), k, out);
  return k;
}

void block_maxima(const float* scores, int64_t n, int64_t block, float* best) {
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = std::min(begin + block, n);
    float top = -std::numeric_limits<float>::infinity();
    for (int64_t i = begin; i < end; ++i) top = scores[i] > top ? scores[i] : top;  // false for NaN
    *best++ = top;
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
