// Sampling: temperature, top-p, top-k, then the inverse of the cumulative distribution in id order.
#include "choice.hpp"
#include "dspark_kernels.hpp"
#include "random.hpp"

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {
namespace {

void sample_row(const Sample& a, int64_t t) {
  const float* logits = a.logits + t * a.vocab;
  const Row row(logits, a.vocab);
  if (!row.usable()) {
    a.chosen[t] = -1;
    a.logprobs[t] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const Choice choice(row, {a.temperature[t], a.top_p[t], a.top_k ? a.top_k[t] : 0});
  const int64_t token = choice.draw(uniform(a.seeds[t], a.positions[t], a.draw));
  a.chosen[t] = token;
  a.logprobs[t] = static_cast<float>(row.logprob(logits[token]));
}

}  // namespace

void sample(const Sample& a) {
  kernel_core::parallel_for(a.tokens, 8 * a.vocab, [&](int64_t t) { sample_row(a, t); });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
