// Verification of drafts: rejection sampling (Leviathan et al. 2023; Chen et al. 2023), or, for coupled and greedy
// requests, equality with the token that the target would have chosen.
#include "choice.hpp"
#include "dspark_kernels.hpp"
#include "random.hpp"

namespace dspark_kernels {
namespace KERNEL_CORE_ISA {
namespace {

// probabilities of n tokens from `first` on
void probabilities(const Law& law, const float* x, int64_t n, int64_t first, float* out) {
  weights_of(x, n, law.top, law.factor, out);
  const float share = static_cast<float>(1.0 / law.mass);
  for (int64_t i = 0; i < n; ++i) out[i] *= share;
  if (law.cut == 0) return;
  for (int64_t i = 0; i < n; ++i)
    if (!law.holds(x[i], first + i)) out[i] = 0.0f;
}

// A token from max(p - q, 0), or -1 where it has no mass.
int64_t draw_residual(const Row& row, const Law& p, const float* draft, const Law& q, double u) {
  thread_local std::vector<float> rest, sums;
  rest.resize(row.vocab());
  sums.resize(row.blocks());
  alignas(64) float other[kBlock];
  double total = 0;
  for (int64_t b = 0; b < row.blocks(); ++b) {
    const int64_t first = b * kBlock, n = row.length(b);
    probabilities(p, row.block(b), n, first, &rest[first]);
    probabilities(q, draft + first, n, first, other);
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      rest[first + i] = std::max(rest[first + i] - other[i], 0.0f);
      sum += rest[first + i];
    }
    sums[b] = sum;
    total += sum;
  }
  if (!(total > 0)) return -1;
  return reach_in_blocks(sums, u * total, row.vocab(), [&](int64_t b) { return &rest[b * kBlock]; });
}

class Request {
 public:
  Request(const Verify& a, int64_t r)
      : a_(a), r_(r), first_(a.cu_rows[r]), length_(a.cu_rows[r + 1] - first_ - 1), slot_(a.slots ? a.slots[r] : r) {}

  void run() {
    const int64_t width = a_.drafts + 1;
    std::fill_n(a_.tokens + r_ * width, width, -1);
    std::fill_n(a_.logprobs + r_ * width, width, std::numeric_limits<float>::quiet_NaN());
    a_.accepted[r_] = a_.counts[r_] = 0;
    a_.failed[r_] = 0;
    a_.last[r_] = -1;
    for (int64_t j = 0; j <= length_; ++j)
      if (!decide(j)) return;
  }

 private:
  // Emits the token of place j. Returns whether it is an accepted draft.
  bool decide(int64_t j) {
    const float* logits = a_.logits + (first_ + j) * a_.vocab;
    const Row row(logits, a_.vocab);
    if (!row.usable()) {
      a_.failed[r_] = 1;
      return false;
    }
    const Choice choice(row, {a_.temperature[r_], a_.top_p[r_], a_.top_k ? a_.top_k[r_] : 0});
    const int64_t position = a_.positions[first_ + j] + 1;
    const auto u = [&](int64_t draw) { return uniform(a_.seeds[r_], position, draw); };
    const bool matched = (a_.coupled && a_.coupled[r_]) || a_.temperature[r_] < kGreedyBelow;
    if (j == length_ || matched) {
      const int64_t token = choice.draw(u(kTarget));
      emit(j, token, row);
      return j < length_ && accept(j, a_.draft_tokens[slot_ * a_.drafts + j] == token);
    }
    const int64_t at = slot_ * a_.drafts + j, draft = a_.draft_tokens[at];
    const bool known = draft >= 0 && draft < a_.vocab && std::isfinite(a_.draft_logprobs[at]);
    const Law& p = choice.law();
    if (known && u(kAccept) < std::exp(p.log_probability(logits[draft], draft) - a_.draft_logprobs[at])) {
      emit(j, draft, row);
      return accept(j, true);
    }
    int64_t token = -1;
    if (known) {
      const Law q{a_.draft_top[at], a_.draft_factor[at], a_.draft_mass[at], static_cast<uint64_t>(a_.draft_cut[at])};
      const float* draft_row = a_.draft_logits + slot_ * a_.draft_request + j * a_.draft_step;
      token = draw_residual(row, p, draft_row, q, u(kResidual));
    }
    emit(j, token >= 0 ? token : choice.draw(u(kResidual)), row);
    return false;
  }

  bool accept(int64_t j, bool accepted) {
    if (accepted) a_.accepted[r_] = static_cast<int32_t>(j) + 1;
    return accepted;
  }

  void emit(int64_t j, int64_t token, const Row& row) {
    const int64_t at = r_ * (a_.drafts + 1) + j;
    a_.tokens[at] = a_.last[r_] = token;
    a_.logprobs[at] = static_cast<float>(row.logprob(a_.logits[(first_ + j) * a_.vocab + token]));
    a_.counts[r_] = static_cast<int32_t>(j) + 1;
  }

  const Verify& a_;
  const int64_t r_, first_, length_, slot_;
};

}  // namespace

void verify(const Verify& a) {
  const int64_t mean = a.requests ? std::max<int64_t>(1, a.rows / a.requests) : 1;
  kernel_core::parallel_for(a.requests, 8 * a.vocab * mean, [&](int64_t r) { Request(a, r).run(); });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace dspark_kernels
