// One row of logits in fixed blocks: its maximum, its sums of exponentials, and its leading tokens.
//
// Blocks are the same for every row length, batch and thread count, and their sums are added in order.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernel_core/parallel.hpp"
#include "kernel_core/simd.hpp"

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {

using namespace kernel_core::KERNEL_CORE_ISA;

constexpr int64_t kBlock = 256;
constexpr int64_t kBlocksAnItem = 64;  // shared by the threads when there is a single row
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float block_max(const float* x, int64_t n) {  // skips NaN
  constexpr int w = F32::width;
  F32 top = F32::set(-kInfinity);
  int64_t i = 0;
  for (; i + w <= n; i += w) top = max(F32::load(x + i), top);
  float result = reduce_max(top);
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// sum of exp((x - top) * factor); NaN if any x is
inline float block_sum(const float* x, int64_t n, float top, float factor) {
  constexpr int w = F32::width;
  const F32 t = F32::set(top), f = F32::set(factor);
  F32 s0 = F32::zero(), s1 = F32::zero();
  int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    s0 = s0 + exp((F32::load(x + i) - t) * f);
    s1 = s1 + exp((F32::load(x + i + w) - t) * f);
  }
  float sum = reduce_add(s0 + s1);
  for (; i < n; ++i) {
    alignas(64) float lanes[w];
    exp((F32::set(x[i]) - t) * f).store(lanes);
    sum += lanes[0];
  }
  return sum;
}

// exp((x - top) * factor) of n values
inline void weights_of(const float* x, int64_t n, float top, float factor, float* out) {
  constexpr int w = F32::width;
  for (int64_t i = 0; i < n; i += w) {
    const int m = static_cast<int>(std::min<int64_t>(w, n - i));
    exp((F32::load_n(x + i, m) - F32::set(top)) * F32::set(factor)).store_n(out + i, m);
  }
}

// Sum of n values, a whole number of registers
inline float plain_sum(const float* x, int64_t n) {
  F32 sum = F32::zero();
  for (int64_t i = 0; i < n; i += F32::width) sum = sum + F32::load(x + i);
  return reduce_add(sum);
}

// Descending order of keys = descending logits, the lower id first among equals.
inline uint64_t order_key(float x, int64_t id) {
  const uint32_t bits = bit_cast<uint32_t>(x + 0.0f);  // -0 becomes +0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}

// The values >= cut of a block, in order; room for all n.
inline int64_t collect_block(const float* x, int64_t n, float cut, int64_t first, int32_t* ids, float* values) {
  int64_t count = 0;
  int64_t i = 0;
#if defined(KERNEL_CORE_ISA_avx512)
  const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __mmask16 kept = _mm512_cmp_ps_mask(v, _mm512_set1_ps(cut), _CMP_GE_OQ);
    _mm512_mask_compressstoreu_ps(values + count, kept, v);
    _mm512_mask_compressstoreu_epi32(ids + count, kept,
                                     _mm512_add_epi32(step, _mm512_set1_epi32(static_cast<int>(first + i))));
    count += __builtin_popcount(kept);
  }
#endif
  for (; i < n; ++i) {
    ids[count] = static_cast<int32_t>(first + i);
    values[count] = x[i];
    count += x[i] >= cut;  // no branch: half of them may be kept
  }
  return count;
}

class Row {
 public:
  Row(const float* logits, int64_t vocab) : x_(logits), vocab_(vocab) {
    maxima_.resize(blocks());
    each_block([&](int64_t b) { maxima_[b] = block_max(x_ + b * kBlock, length(b)); });
    for (float m : maxima_) top_ = std::max(top_, m);
    // A NaN anywhere turns the sum into NaN; +inf and a row without a finite logit are no distribution either.
    if (std::isfinite(top_)) mass_ = sum(1.0f, sums_);
  }

  bool usable() const { return mass_ > 0; }
  float top() const { return top_; }
  double logprob(float x) const { return static_cast<double>(x) - top_ - std::log(mass_); }

  // Sum over the row of exp((x - top) * factor), and of each block.
  double sum(float factor, std::vector<float>& sums) const {
    sums.resize(blocks());
    each_block([&](int64_t b) { sums[b] = block_sum(x_ + b * kBlock, length(b), top_, factor); });
    double total = 0;
    for (float s : sums) total += s;
    return total;
  }
  const std::vector<float>& plain_sums() const { return sums_; }
  double plain_mass() const { return mass_; }

  int64_t argmax() const {
    int64_t b = 0;
    while (maxima_[b] != top_) ++b;
    int64_t i = b * kBlock;
    while (x_[i] != top_) ++i;
    return i;
  }

  // A logit that at least k tokens reach: the k-th largest maximum of separate pieces. -inf where pieces get small.
  float reached_by(int64_t k) const {
    std::vector<float> m;
    if (k <= blocks()) {
      m = maxima_;
    } else {
      const int64_t piece = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(vocab_ / (2 * k))));
      if (piece < F32::width) return -kInfinity;
      for (int64_t i = 0; i < vocab_; i += piece) m.push_back(block_max(x_ + i, std::min(piece, vocab_ - i)));
    }
    std::nth_element(m.begin(), m.begin() + (k - 1), m.end(), std::greater<float>());
    return m[k - 1];
  }

  // Finite logits >= cut with their ids, ids ascending; returns how many. The vectors grow to hold them and never
  // shrink, so that a warm thread neither allocates nor clears.
  int64_t collect(float cut, std::vector<int32_t>& ids, std::vector<float>& values) const {
    cut = std::max(cut, std::numeric_limits<float>::lowest());
    int64_t count = 0;
    for (int64_t b = 0; b < blocks(); ++b) {
      if (maxima_[b] < cut) continue;
      if (static_cast<int64_t>(ids.size()) < count + kBlock) {
        ids.resize(2 * count + kBlock);
        values.resize(2 * count + kBlock);
      }
      count += collect_block(block(b), length(b), cut, b * kBlock, ids.data() + count, values.data() + count);
    }
    return count;
  }

  int64_t vocab() const { return vocab_; }
  int64_t blocks() const { return (vocab_ + kBlock - 1) / kBlock; }
  int64_t length(int64_t b) const { return std::min(kBlock, vocab_ - b * kBlock); }
  const float* block(int64_t b) const { return x_ + b * kBlock; }

 private:
  template <typename F>
  void each_block(F&& f) const {
    const int64_t count = blocks();
    kernel_core::parallel_for((count + kBlocksAnItem - 1) / kBlocksAnItem, kBlocksAnItem * kBlock, [&](int64_t item) {
      const int64_t end = std::min(count, (item + 1) * kBlocksAnItem);
      for (int64_t b = item * kBlocksAnItem; b < end; ++b) f(b);
    });
  }

  const float* x_;
  int64_t vocab_;
  float top_ = -kInfinity;
  double mass_ = -1;
  std::vector<float> maxima_, sums_;
};

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
