#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cmath>

#include "dspark_kernels.hpp"
#include "kernel_core/bindings.hpp"
#include "random.hpp"
#include "schedule.hpp"

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

std::pair<int64_t, char> bad_request(int64_t requests, int64_t tables, uintptr_t limits, uintptr_t slots) {
  const int32_t *l = pointer<int32_t>(limits), *s = pointer<int32_t>(slots);
  for (int64_t r = 0; r < requests; ++r) {
    if (l[r] < -1) return {r, 'l'};
    if (s && (s[r] < -1 || s[r] >= tables)) return {r, 's'};
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

  // Returns the first place in `rows` that is neither -1 nor in [0, tokens), or -1; only then anything is written.
  m.def(
      "token_mask",
      [](int64_t tokens, int64_t count, int64_t vocab, int64_t words, uintptr_t logits, uintptr_t bitmask,
         uintptr_t rows) -> int64_t {
        const TokenMask a{
            count, vocab, words, pointer<float>(logits), pointer<int32_t>(bitmask), pointer<int64_t>(rows)};
        for (int64_t i = 0; a.rows && i < count; ++i)
          if (a.rows[i] < -1 || a.rows[i] >= tokens) return i;
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

  m.def(
      "confidence_head",
      [](int64_t requests, int64_t drafts, int64_t hidden_size, int64_t markov_size, uintptr_t hidden,
         int64_t hidden_request, int64_t hidden_draft, uintptr_t markov, uintptr_t weight, uintptr_t temperatures,
         uintptr_t logits, uintptr_t confidence, uintptr_t survival) {
        KERNEL_CORE_PICK(confidence_head)
        ({requests, drafts, hidden_size, markov_size, pointer<float>(hidden), hidden_request, hidden_draft,
          pointer<float>(markov), pointer<float>(weight), pointer<float>(temperatures), pointer<float>(logits),
          pointer<float>(confidence), pointer<float>(survival)});
      },
      NoGil());

  // First request whose limit ('l') or slot ('s') is outside its range. Request -1 if there is none.
  m.def("bad_request", &bad_request);

  // Returns the rows that are needed where they do not fit, and then writes nothing; otherwise 0.
  m.def(
      "schedule",
      [](int64_t requests, int64_t drafts, int64_t capacity, uintptr_t confidence, uintptr_t tokens, uintptr_t starts,
         uintptr_t limits, uintptr_t slots, uintptr_t fixed, int64_t budget, uintptr_t device_budget,
         const std::array<uintptr_t, 11>& out) {
        return schedule({requests,
                         drafts,
                         capacity,
                         pointer<float>(confidence),
                         pointer<int64_t>(tokens),
                         pointer<int64_t>(starts),
                         pointer<int32_t>(limits),
                         pointer<int32_t>(slots),
                         pointer<int32_t>(fixed),
                         budget,
                         pointer<int32_t>(device_budget),
                         pointer<int32_t>(out[0]),
                         pointer<int32_t>(out[1]),
                         pointer<float>(out[2]),
                         pointer<int32_t>(out[3]),
                         pointer<int32_t>(out[4]),
                         pointer<int32_t>(out[5]),
                         pointer<int32_t>(out[6]),
                         pointer<int64_t>(out[7]),
                         pointer<int64_t>(out[8]),
                         pointer<int32_t>(out[9]),
                         pointer<int32_t>(out[10])});
      },
      NoGil());

  m.def(
      "draft_step",
      [](int64_t requests, int64_t vocab, int64_t drafts, int64_t step, uintptr_t logits, int64_t row_stride,
         uintptr_t bias, uintptr_t temperature, uintptr_t top_p, uintptr_t top_k, uintptr_t seeds, uintptr_t positions,
         uintptr_t coupled, uintptr_t chosen, const std::array<uintptr_t, 6>& records) {
        KERNEL_CORE_PICK(draft_step)
        ({requests,
          vocab,
          drafts,
          step,
          pointer<float>(logits),
          row_stride,
          pointer<float>(bias),
          pointer<float>(temperature),
          pointer<float>(top_p),
          pointer<int32_t>(top_k),
          pointer<int64_t>(seeds),
          pointer<int64_t>(positions),
          pointer<uint8_t>(coupled),
          pointer<int64_t>(chosen),
          pointer<int64_t>(records[0]),
          pointer<float>(records[1]),
          pointer<float>(records[2]),
          pointer<float>(records[3]),
          pointer<double>(records[4]),
          pointer<int64_t>(records[5])});
      },
      NoGil());

  m.def(
      "verify",
      [](int64_t requests, int64_t rows, int64_t vocab, int64_t drafts, uintptr_t logits, uintptr_t draft_logits,
         int64_t draft_request, int64_t draft_step, const std::array<uintptr_t, 6>& records, uintptr_t cu_rows,
         uintptr_t positions, uintptr_t temperature, uintptr_t top_p, uintptr_t top_k, uintptr_t seeds, uintptr_t slots,
         uintptr_t coupled, const std::array<uintptr_t, 6>& out) {
        KERNEL_CORE_PICK(verify)
        ({requests,
          rows,
          vocab,
          drafts,
          pointer<float>(logits),
          pointer<float>(draft_logits),
          draft_request,
          draft_step,
          pointer<int64_t>(records[0]),
          pointer<float>(records[1]),
          pointer<float>(records[2]),
          pointer<float>(records[3]),
          pointer<double>(records[4]),
          pointer<int64_t>(records[5]),
          pointer<int32_t>(cu_rows),
          pointer<int64_t>(positions),
          pointer<float>(temperature),
          pointer<float>(top_p),
          pointer<int32_t>(top_k),
          pointer<int64_t>(seeds),
          pointer<int32_t>(slots),
          pointer<uint8_t>(coupled),
          pointer<int64_t>(out[0]),
          pointer<float>(out[1]),
          pointer<int32_t>(out[2]),
          pointer<int32_t>(out[3]),
          pointer<uint8_t>(out[4]),
          pointer<int64_t>(out[5])});
      },
      NoGil());
}
