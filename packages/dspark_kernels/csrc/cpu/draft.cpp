// The confidence head, and one step of a block of drafts: the bias of the token before, one draw, and the record of
// the distribution that verification needs again.
#include "choice.hpp"
#include "dspark_kernels.hpp"
#include "random.hpp"
#include "survival.hpp"

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {
namespace {

void add_to(float* x, const float* bias, int64_t n) {
  constexpr int w = F32::width;
  int64_t i = 0;
  for (; i + w <= n; i += w) (F32::load(x + i) + F32::load(bias + i)).store(x + i);
  for (; i < n; ++i) x[i] += bias[i];
}

void draft_row(const DraftStep& a, int64_t b) {
  float* logits = a.logits + b * a.row_stride;
  if (a.bias) add_to(logits, a.bias + b * a.vocab, a.vocab);
  const int64_t at = b * a.drafts + a.step;
  const Row row(logits, a.vocab);
  if (!row.usable()) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    a.chosen[b] = a.tokens[at] = -1;
    a.logprobs[at] = a.top[at] = a.factor[at] = nan;
    a.mass[at] = nan;
    a.cut[at] = 0;
    return;
  }
  const Choice choice(row, {a.temperature[b], a.top_p[b], a.top_k ? a.top_k[b] : 0});
  const int64_t draw = a.coupled && a.coupled[b] ? kTarget : kDraft;
  const int64_t token = choice.draw(uniform(a.seeds[b], a.positions[b] + 1 + a.step, draw));
  const Law& law = choice.law();
  a.chosen[b] = a.tokens[at] = token;
  a.logprobs[at] = static_cast<float>(law.log_probability(logits[token], token));
  a.top[at] = law.top;
  a.factor[at] = law.factor;
  a.mass[at] = law.mass;
  a.cut[at] = static_cast<int64_t>(law.cut);
}

}  // namespace

void draft_step(const DraftStep& a) {
  kernel_core::parallel_for(a.requests, 8 * a.vocab, [&](int64_t b) { draft_row(a, b); });
}

void confidence_head(const ConfidenceHead& a) {
  constexpr float kLimit = 60.0f;  // the sigmoid is at its end long before
  const int64_t cost = a.drafts * (a.hidden_size + a.markov_size) / 4;
  kernel_core::parallel_for(a.requests, cost, [&](int64_t b) {
    float running = 1.0f;
    for (int64_t k = 0; k < a.drafts; ++k) {
      const int64_t at = b * a.drafts + k;
      const float* hidden = a.hidden + b * a.hidden_request + k * a.hidden_draft;
      const float logit = dot(hidden, a.weight, a.hidden_size) +
                          dot(a.markov + at * a.markov_size, a.weight + a.hidden_size, a.markov_size);
      const float scaled = a.temperatures ? logit / a.temperatures[k] : logit;
      a.logits[at] = logit;
      a.confidence[at] = std::isnan(scaled) ? 0.0f : 1.0f / (1.0f + std::exp(-std::clamp(scaled, -kLimit, kLimit)));
      a.survival[at] = running = survive(running, a.confidence[at]);
    }
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
