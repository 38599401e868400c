// Sampling: temperature, top-p, top-k, then the inverse of the cumulative distribution in id order.
#include "dspark_kernels.hpp"
#include "nucleus.hpp"
#include "random.hpp"
#include "row.hpp"

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {
namespace {

struct Params {
  float temperature, top_p;
  int64_t top_k;  // 0 = off
  double u;
};

// First place where the running sum of n weights reaches `target`, which is above 0; so its weight is above 0 too.
// Rounding may leave the target just beyond the sum: then the last place with a weight.
int64_t reach(const float* weights, int64_t n, double target) {
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

int64_t draw_from_all(const Row& row, const Params& p) {
  thread_local std::vector<float> own;
  const float factor = 1.0f / p.temperature;
  const double total = factor == 1.0f ? row.plain_mass() : row.sum(factor, own);
  alignas(64) float weights[kBlock];
  return reach_in_blocks(factor == 1.0f ? row.plain_sums() : own, p.u * total, row.vocab(), [&](int64_t b) {
    weights_of(row.block(b), row.length(b), row.top(), factor, weights);
    return weights;
  });
}

int64_t draw_from_prefix(const Row& row, const Params& p) {
  thread_local Candidates c;
  thread_local std::vector<float> sums;

  const float factor = 1.0f / p.temperature;
  double mass = std::numeric_limits<double>::infinity();
  double cut = -kInfinity;
  if (p.top_p < 1.0f) {
    // Tokens lighter than the mass left out, shared by all, come after the cut: together they are lighter than it.
    const double total = factor == 1.0f ? row.plain_mass() : row.sum(factor, sums);
    mass = static_cast<double>(p.top_p) * total;
    const double light = 0.5 * (1.0 - static_cast<double>(p.top_p)) * total / static_cast<double>(row.vocab());
    cut = row.top() + static_cast<double>(p.temperature) * std::log(std::min(1.0, light));
  }
  if (p.top_k > 0 && p.top_k < row.vocab()) cut = std::max<double>(cut, row.reached_by(p.top_k));
  const float low = std::max(static_cast<float>(cut), std::numeric_limits<float>::lowest());
  collect(row, low, factor, c);

  const int64_t end = prefix_end(c, low, row.top(), mass, p.top_k > 0 ? p.top_k : c.size);
  const float last = c.values[end];
  const int64_t count = c.size;
  for (int64_t i = 0; i < count; ++i) c.weights[i] = c.values[i] < last ? 0.0f : c.weights[i];
  for (int64_t i = end + 1; i < count; ++i) c.weights[i] = c.values[i] == last ? 0.0f : c.weights[i];
  sums.clear();
  double total = 0;
  for (int64_t b = 0; b < count; b += kBlock) {
    sums.push_back(plain_sum(&c.weights[b], std::min(kBlock, c.padded() - b)));
    total += sums.back();
  }
  return c.ids[reach_in_blocks(sums, p.u * total, count, [&](int64_t b) { return &c.weights[b * kBlock]; })];
}

void sample_row(const Sample& a, int64_t t) {
  const float* logits = a.logits + t * a.vocab;
  const Row row(logits, a.vocab);
  if (!row.usable()) {
    a.chosen[t] = -1;
    a.logprobs[t] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const Params p{a.temperature[t], a.top_p[t], a.top_k ? a.top_k[t] : 0, uniform(a.seeds[t], a.positions[t], a.draw)};
  int64_t token;
  if (p.temperature < kGreedyBelow) {
    token = row.argmax();
  } else if (p.top_p >= 1.0f && (p.top_k == 0 || p.top_k >= a.vocab)) {
    token = draw_from_all(row, p);
  } else {
    token = draw_from_prefix(row, p);
  }
  a.chosen[t] = token;
  a.logprobs[t] = static_cast<float>(row.logprob(logits[token]));
}

}  // namespace

void sample(const Sample& a) {
  kernel_core::parallel_for(a.tokens, 8 * a.vocab, [&](int64_t t) { sample_row(a, t); });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
