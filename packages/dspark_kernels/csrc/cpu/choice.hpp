// A row's distribution after temperature and filters, and a draw from it by the inverse cumulative sum in id order.
#pragma once

#include "dspark_kernels.hpp"
#include "nucleus.hpp"
#include "row.hpp"

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {

struct Params {
  float temperature, top_p;
  int64_t top_k;  // 0 = off
};

// probability of v = exp((x_v - top) * factor) / mass if order_key(x_v, v) >= cut, else 0
struct Law {
  float top = 0, factor = 1;
  double mass = 1;
  uint64_t cut = 0;

  bool holds(float x, int64_t id) const { return order_key(x, id) >= cut; }
  double log_probability(float x, int64_t id) const {
    return holds(x, id) ? static_cast<double>((x - top) * factor) - std::log(mass) : -kInfinity;
  }
};

// First place where the running sum of n weights reaches `target`, which is above 0; so its weight is above 0 too.
// Rounding may leave the target just beyond the sum: then the last place with a weight.
inline int64_t reach(const float* weights, int64_t n, double target) {
  int64_t last = 0;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += weights[i];
    if (sum >= target) return i;
    if (weights[i] > 0) last = i;
  }
  return last;
}

// The same over blocks whose sums are known; `weights_of_block(b)` gives the weights of one.
template <typename F>
int64_t reach_in_blocks(const std::vector<float>& sums, double target, int64_t vocab, F&& weights_of_block) {
  const int64_t b = reach(sums.data(), static_cast<int64_t>(sums.size()), target);
  for (int64_t i = 0; i < b; ++i) target -= sums[i];
  return b * kBlock + reach(weights_of_block(b), std::min(kBlock, vocab - b * kBlock), target);
}

// The law of one usable row. Its scratch is the thread's: one Choice at a time.
class Choice {
 public:
  Choice(const Row& row, const Params& p) : row_(row) {
    law_.top = row.top();
    if (p.temperature < kGreedyBelow) {
      one_ = row.argmax();
      law_.cut = order_key(law_.top, one_);
      return;
    }
    law_.factor = 1.0f / p.temperature;
    filtered_ = p.top_p < 1.0f || (p.top_k > 0 && p.top_k < row.vocab());
    if (filtered_) {
      keep_prefix(p);
    } else {
      law_.mass = whole_mass();
    }
  }

  const Law& law() const { return law_; }

  int64_t draw(double u) const {
    if (one_ >= 0) return one_;
    const Scratch& s = scratch();
    const double target = u * law_.mass;
    if (filtered_) {
      return s.kept
          .ids[reach_in_blocks(s.sums, target, s.kept.size, [&](int64_t b) { return &s.kept.weights[b * kBlock]; })];
    }
    alignas(64) float weights[kBlock];
    return reach_in_blocks(law_.factor == 1.0f ? row_.plain_sums() : s.sums, target, row_.vocab(), [&](int64_t b) {
      weights_of(row_.block(b), row_.length(b), row_.top(), law_.factor, weights);
      return weights;
    });
  }

 private:
  struct Scratch {
    Candidates kept;
    std::vector<float> sums;  // of blocks: of the row, or of what was kept
  };
  static Scratch& scratch() {
    thread_local Scratch s;
    return s;
  }

  double whole_mass() const { return law_.factor == 1.0f ? row_.plain_mass() : row_.sum(law_.factor, scratch().sums); }

  void keep_prefix(const Params& p) {
    Candidates& c = scratch().kept;
    std::vector<float>& sums = scratch().sums;
    double mass = std::numeric_limits<double>::infinity();
    double cut = -kInfinity;
    if (p.top_p < 1.0f) {
      // Tokens lighter than the mass left out, shared by all, come after the cut: together they are lighter than it.
      const double total = whole_mass();
      mass = static_cast<double>(p.top_p) * total;
      const double light = 0.5 * (1.0 - static_cast<double>(p.top_p)) * total / static_cast<double>(row_.vocab());
      cut = row_.top() + static_cast<double>(p.temperature) * std::log(std::min(1.0, light));
    }
    if (p.top_k > 0 && p.top_k < row_.vocab()) cut = std::max<double>(cut, row_.reached_by(p.top_k));
    const float low = std::max(static_cast<float>(cut), std::numeric_limits<float>::lowest());
    collect(row_, low, law_.factor, c);

    const int64_t end = prefix_end(c, low, row_.top(), mass, p.top_k > 0 ? p.top_k : c.size);
    const float last = c.values[end];
    const int64_t count = c.size;
    for (int64_t i = 0; i < count; ++i) c.weights[i] = c.values[i] < last ? 0.0f : c.weights[i];
    for (int64_t i = end + 1; i < count; ++i) c.weights[i] = c.values[i] == last ? 0.0f : c.weights[i];
    sums.clear();
    law_.mass = 0;
    for (int64_t b = 0; b < count; b += kBlock) {
      sums.push_back(plain_sum(&c.weights[b], std::min(kBlock, c.padded() - b)));
      law_.mass += sums.back();
    }
    law_.cut = order_key(last, c.ids[end]);
  }

  const Row& row_;
  Law law_;
  int64_t one_ = -1;
  bool filtered_ = false;
};

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
