// One row of logits in fixed blocks: its maximum, its sums of exponentials, and its leading tokens.
//
// Blocks are the same for every row length, batch and thread count, and their sums are added in order.
#pragma once

#include <algorithm>
#include <cmath>
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

// Descending order of keys = descending logits, the lower id first among equals.
inline uint64_t order_key(float x, int64_t id) {
  const uint32_t bits = bit_cast<uint32_t>(x + 0.0f);  // -0 becomes +0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
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

  // A logit that at least k tokens reach, from the blocks' maxima; -inf if there are fewer blocks than that.
  float reached_by(int64_t k) const {
    if (k > blocks()) return -kInfinity;
    std::vector<float> m = maxima_;
    std::nth_element(m.begin(), m.begin() + (k - 1), m.end(), std::greater<float>());
    return m[k - 1];
  }

  // Finite logits >= cut with their ids, ids ascending.
  void collect(float cut, std::vector<int32_t>& ids, std::vector<float>& values) const {
    ids.clear();
    values.clear();
    cut = std::max(cut, std::numeric_limits<float>::lowest());
    for (int64_t b = 0; b < blocks(); ++b) {
      if (maxima_[b] < cut) continue;
      const int64_t end = b * kBlock + length(b);
      for (int64_t i = b * kBlock; i < end; ++i) {
        if (x_[i] >= cut) {
          ids.push_back(static_cast<int32_t>(i));
          values.push_back(x_[i]);
        }
      }
    }
  }

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
