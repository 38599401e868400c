#include <pybind11/pybind11.h>

#include <cmath>

#include "dspark_kernels.hpp"
#include "kernel_core/bindings.hpp"
#include "random.hpp"

using kernel_core::NoGil;
using kernel_core::pointer;
using namespace dspark_kernels;

namespace {

// First row with a parameter outside its range, and which: 't'emperature, top_'p', top_'k'. Row -1 if there is none.
std::pair<int64_t, char> bad_parameter(int64_t tokens, uintptr_t temperature, uintptr_t top_p, uintptr_t top_k) {
  const float *t = pointer<float>(temperature), *p = pointer<float>(top_p);
  const int32_t* k = pointer<int32_t>(top_k);
  for (int64_t i = 0; i < tokens; ++i) {
    if (!(t[i] >= 0) || std::isinf(t[i])) return {i, 't'};
    if (!(p[i] > 0 && p[i] <= 1)) return {i, 'p'};
    if (k && k[i] < 0) return {i, 'k'};
  }
  return {-1, 0};
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
  m.attr("draws") = kDraws;

  m.def("bad_parameter", &bad_parameter);

  m.def(
      "sample",
      [](int64_t tokens, int64_t vocab, uintptr_t logits, uintptr_t temperature, uintptr_t top_p, uintptr_t top_k,
         uintptr_t seeds, uintptr_t positions, int64_t draw, uintptr_t chosen, uintptr_t logprobs) {
        KERNEL_CORE_PICK(sample)
        ({tokens, vocab, pointer<float>(logits), pointer<float>(temperature), pointer<float>(top_p),
          pointer<int32_t>(top_k), pointer<int64_t>(seeds), pointer<int64_t>(positions), draw, pointer<int64_t>(chosen),
          pointer<float>(logprobs)});
      },
      NoGil());

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
