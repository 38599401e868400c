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

int64_t draw_from_all(const Row& row, const Params& p) {
  const float factor = 1.0f / p.temperature;
  std::vector<float> own;
  double total = row.plain_mass();
  if (factor != 1.0f) total = row.sum(factor, own);
  const std::vector<float>& sums = factor == 1.0f ? row.plain_sums() : own;
  const int64_t b = reach(sums.data(), row.blocks(), p.u * total);
  double before = 0;
  for (int64_t i = 0; i < b; ++i) before += sums[i];
  alignas(64) float weights[kBlock];
  weights_of(row.block(b), row.length(b), row.top(), factor, weights);
  return b * kBlock + reach(weights, row.length(b), p.u * total - before);
}

int64_t draw_from_prefix(const Row& row, int64_t vocab, const Params& p) {
  thread_local std::vector<int32_t> ids;
  thread_local std::vector<float> values, weights;
  thread_local std::vector<Candidate> list;

  const float factor = 1.0f / p.temperature;
  double mass = std::numeric_limits<double>::infinity();
  double cut = -kInfinity;
  if (p.top_p < 1.0f) {
    // Tokens lighter than the mass left out, shared by all, come after the cut: together they are lighter than it.
    std::vector<float> own;
    const double total = factor == 1.0f ? row.plain_mass() : row.sum(factor, own);
    mass = static_cast<double>(p.top_p) * total;
    const double light = 0.5 * (1.0 - static_cast<double>(p.top_p)) * total / static_cast<double>(vocab);
    cut = row.top() + static_cast<double>(p.temperature) * std::log(std::min(1.0, light));
  }
  if (p.top_k > 0 && p.top_k < vocab) cut = std::max<double>(cut, row.reached_by(p.top_k));
  row.collect(static_cast<float>(cut), ids, values);

  const int64_t count = static_cast<int64_t>(ids.size());
  weights.resize(count);
  list.resize(count);
  weights_of(values.data(), count, row.top(), factor, weights.data());
  for (int64_t i = 0; i < count; ++i) list[i] = {order_key(values[i], ids[i]), weights[i]};
  const uint64_t end = prefix_end(list, mass, p.top_k > 0 ? p.top_k : count);
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (order_key(values[i], ids[i]) < end) weights[i] = 0.0f;
    total += weights[i];
  }
  return ids[reach(weights.data(), count, p.u * total)];
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
    token = draw_from_prefix(row, a.vocab, p);
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
