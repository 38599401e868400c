#include <pybind11/pybind11.h>

#include <cmath>

#include "dspark_kernels.hpp"
#include "kernel_core/bindings.hpp"
#include "random.hpp"

using kernel_core::NoGil;
using kernel_core::pointer;
using namespace dspark_kernels;

namespace {

// Rows whose parameters are outside the allowed ranges: (row, 't' | 'p' | 'k'), or row -1.
std::pair<int64_t, char> first_bad(const Sample& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    if (!(a.temperature[t] >= 0) || std::isinf(a.temperature[t])) return {t, 't'};
    if (!(a.top_p[t] > 0 && a.top_p[t] <= 1)) return {t, 'p'};
    if (a.top_k && a.top_k[t] < 0) return {t, 'k'};
  }
  return {-1, 0};
}

// Returns the first row with a bad parameter and which it is; only without one anything is written.
std::pair<int64_t, char> checked_sample(int64_t tokens, int64_t vocab, uintptr_t logits, uintptr_t temperature,
                                        uintptr_t top_p, uintptr_t top_k, uintptr_t seeds, uintptr_t positions,
                                        int64_t draw, uintptr_t chosen, uintptr_t logprobs) {
  const Sample a{tokens,
                 vocab,
                 pointer<float>(logits),
                 pointer<float>(temperature),
                 pointer<float>(top_p),
                 pointer<int32_t>(top_k),
                 pointer<int64_t>(seeds),
                 pointer<int64_t>(positions),
                 draw,
                 pointer<int64_t>(chosen),
                 pointer<float>(logprobs)};
  const auto bad = first_bad(a);
  if (bad.first < 0) KERNEL_CORE_PICK(sample)(a);
  return bad;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
  m.attr("draws") = kDraws;

  m.def("sample", &checked_sample, NoGil());

  m.def(
      "top_logprobs",
      [](int64_t tokens, int64_t vocab, int64_t k, uintptr_t logits, uintptr_t ids, uintptr_t logprobs) {
        KERNEL_CORE_PICK(top_logprobs)
        ({tokens, vocab, k, pointer<float>(logits), pointer<int64_t>(ids), pointer<float>(logprobs)});
      },
      NoGil());

  // Returns the first place in `rows` outside [0, tokens), or -1; only then anything is written.
  m.def(
      "token_mask",
      [](int64_t tokens, int64_t count, int64_t vocab, int64_t words, uintptr_t logits, uintptr_t bitmask,
         uintptr_t rows) -> int64_t {
        const TokenMask a{
            count, vocab, words, pointer<float>(logits), pointer<int32_t>(bitmask), pointer<int64_t>(rows)};
        for (int64_t i = 0; a.rows && i < count; ++i)
          if (a.rows[i] < 0 || a.rows[i] >= tokens) return i;
        KERNEL_CORE_PICK(token_mask)(a);
        return -1;
      },
      NoGil());

  m.def(
      "uniform",
      [](int64_t count, uintptr_t seeds, uintptr_t positions, int64_t draw, uintptr_t out) {
        for (int64_t i = 0; i < count; ++i)
          pointer<double>(out)[i] = uniform(pointer<int64_t>(seeds)[i], pointer<int64_t>(positions)[i], draw);
      },
      NoGil());
}
