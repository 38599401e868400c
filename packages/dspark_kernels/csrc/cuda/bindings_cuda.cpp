// The CUDA module: device pointers, sizes and a stream as integers. Nothing here waits for the device.
#include <pybind11/pybind11.h>

#include "cuda/rows.hpp"
#include "cuda/schedule_launch.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;
using namespace dspark_kernels;

PYBIND11_MODULE(_cuda, m) {
  m.def("rows_fit", &cuda::rows_fit, py::arg("vocab"));
  m.def("rows_workspace", &cuda::rows_workspace, py::arg("rows"), py::arg("vocab"));
  m.def(
      "schedule",
      [](int64_t requests, int64_t drafts, int64_t capacity, uintptr_t confidence, uintptr_t tokens, uintptr_t starts,
         uintptr_t limits, uintptr_t slots, uintptr_t fixed, int64_t budget, uintptr_t device_budget, uintptr_t lengths,
         uintptr_t cu_rows, uintptr_t survival, uintptr_t owner, uintptr_t place, uintptr_t source, uintptr_t row_of,
         uintptr_t input_tokens, uintptr_t positions, uintptr_t kv_lengths, uintptr_t host, uintptr_t stream) {
        check(cuda::schedule({requests,
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
                              pointer<int32_t>(lengths),
                              pointer<int32_t>(cu_rows),
                              pointer<float>(survival),
                              pointer<int32_t>(owner),
                              pointer<int32_t>(place),
                              pointer<int32_t>(source),
                              pointer<int32_t>(row_of),
                              pointer<int64_t>(input_tokens),
                              pointer<int64_t>(positions),
                              pointer<int32_t>(kv_lengths),
                              pointer<int32_t>(host)},
                             as_stream(stream)),
              "schedule");
      },
      NoGil(), py::arg("requests"), py::arg("drafts"), py::arg("capacity"), py::arg("confidence"), py::arg("tokens"),
      py::arg("starts"), py::arg("limits"), py::arg("slots"), py::arg("fixed"), py::arg("budget"),
      py::arg("device_budget"), py::arg("lengths"), py::arg("cu_rows"), py::arg("survival"), py::arg("owner"),
      py::arg("place"), py::arg("source"), py::arg("row_of"), py::arg("input_tokens"), py::arg("positions"),
      py::arg("kv_lengths"), py::arg("host"), py::arg("stream"));
  m.def(
      "sample",
      [](int64_t tokens, int64_t vocab, uintptr_t logits, uintptr_t temperature, uintptr_t top_p, uintptr_t top_k,
         uintptr_t seeds, uintptr_t positions, int64_t draw, uintptr_t chosen, uintptr_t logprobs, uintptr_t workspace,
         uintptr_t stream) {
        check(cuda::sample({tokens, vocab, pointer<float>(logits), pointer<float>(temperature), pointer<float>(top_p),
                            pointer<int32_t>(top_k), pointer<int64_t>(seeds), pointer<int64_t>(positions), draw,
                            pointer<int64_t>(chosen), pointer<float>(logprobs)},
                           pointer<void>(workspace), as_stream(stream)),
              "sample");
      },
      NoGil(), py::arg("tokens"), py::arg("vocab"), py::arg("logits"), py::arg("temperature"), py::arg("top_p"),
      py::arg("top_k"), py::arg("seeds"), py::arg("positions"), py::arg("draw"), py::arg("chosen"), py::arg("logprobs"),
      py::arg("workspace"), py::arg("stream"));
  m.def(
      "draft_step",
      [](int64_t requests, int64_t vocab, int64_t drafts, int64_t step, uintptr_t logits, int64_t row_stride,
         uintptr_t bias, uintptr_t temperature, uintptr_t top_p, uintptr_t top_k, uintptr_t seeds, uintptr_t positions,
         uintptr_t coupled, uintptr_t chosen, uintptr_t tokens, uintptr_t logprobs, uintptr_t top, uintptr_t factor,
         uintptr_t mass, uintptr_t cut, uintptr_t workspace, uintptr_t stream) {
        check(cuda::draft_step({requests,
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
                                pointer<int64_t>(tokens),
                                pointer<float>(logprobs),
                                pointer<float>(top),
                                pointer<float>(factor),
                                pointer<double>(mass),
                                pointer<int64_t>(cut)},
                               pointer<void>(workspace), as_stream(stream)),
              "draft_step");
      },
      NoGil(), py::arg("requests"), py::arg("vocab"), py::arg("drafts"), py::arg("step"), py::arg("logits"),
      py::arg("row_stride"), py::arg("bias"), py::arg("temperature"), py::arg("top_p"), py::arg("top_k"),
      py::arg("seeds"), py::arg("positions"), py::arg("coupled"), py::arg("chosen"), py::arg("tokens"),
      py::arg("logprobs"), py::arg("top"), py::arg("factor"), py::arg("mass"), py::arg("cut"), py::arg("workspace"),
      py::arg("stream"));
  m.def(
      "verify",
      [](int64_t requests, int64_t rows, int64_t vocab, int64_t drafts, uintptr_t logits, uintptr_t draft_logits,
         int64_t draft_request, int64_t draft_step, uintptr_t draft_tokens, uintptr_t draft_logprobs,
         uintptr_t draft_top, uintptr_t draft_factor, uintptr_t draft_mass, uintptr_t draft_cut, uintptr_t cu_rows,
         uintptr_t positions, uintptr_t temperature, uintptr_t top_p, uintptr_t top_k, uintptr_t seeds, uintptr_t slots,
         uintptr_t coupled, uintptr_t tokens, uintptr_t logprobs, uintptr_t accepted, uintptr_t counts,
         uintptr_t failed, uintptr_t last, uintptr_t workspace, uintptr_t stream) {
        check(cuda::verify({requests,
                            rows,
                            vocab,
                            drafts,
                            pointer<float>(logits),
                            pointer<float>(draft_logits),
                            draft_request,
                            draft_step,
                            pointer<int64_t>(draft_tokens),
                            pointer<float>(draft_logprobs),
                            pointer<float>(draft_top),
                            pointer<float>(draft_factor),
                            pointer<double>(draft_mass),
                            pointer<int64_t>(draft_cut),
                            pointer<int32_t>(cu_rows),
                            pointer<int64_t>(positions),
                            pointer<float>(temperature),
                            pointer<float>(top_p),
                            pointer<int32_t>(top_k),
                            pointer<int64_t>(seeds),
                            pointer<int32_t>(slots),
                            pointer<uint8_t>(coupled),
                            pointer<int64_t>(tokens),
                            pointer<float>(logprobs),
                            pointer<int32_t>(accepted),
                            pointer<int32_t>(counts),
                            pointer<uint8_t>(failed),
                            pointer<int64_t>(last)},
                           pointer<void>(workspace), as_stream(stream)),
              "verify");
      },
      NoGil(), py::arg("requests"), py::arg("rows"), py::arg("vocab"), py::arg("drafts"), py::arg("logits"),
      py::arg("draft_logits"), py::arg("draft_request"), py::arg("draft_step"), py::arg("draft_tokens"),
      py::arg("draft_logprobs"), py::arg("draft_top"), py::arg("draft_factor"), py::arg("draft_mass"),
      py::arg("draft_cut"), py::arg("cu_rows"), py::arg("positions"), py::arg("temperature"), py::arg("top_p"),
      py::arg("top_k"), py::arg("seeds"), py::arg("slots"), py::arg("coupled"), py::arg("tokens"), py::arg("logprobs"),
      py::arg("accepted"), py::arg("counts"), py::arg("failed"), py::arg("last"), py::arg("workspace"),
      py::arg("stream"));
  m.def(
      "token_mask",
      [](int64_t count, int64_t vocab, int64_t words, uintptr_t logits, uintptr_t bitmask, uintptr_t rows,
         uintptr_t stream) {
        check(cuda::token_mask(
                  {count, vocab, words, pointer<float>(logits), pointer<int32_t>(bitmask), pointer<int64_t>(rows)},
                  as_stream(stream)),
              "token_mask");
      },
      NoGil(), py::arg("count"), py::arg("vocab"), py::arg("words"), py::arg("logits"), py::arg("bitmask"),
      py::arg("rows"), py::arg("stream"));
  m.def(
      "confidence_head",
      [](int64_t requests, int64_t drafts, int64_t hidden_size, int64_t markov_size, uintptr_t hidden,
         int64_t hidden_request, int64_t hidden_draft, uintptr_t markov, uintptr_t weight, uintptr_t temperatures,
         uintptr_t logits, uintptr_t confidence, uintptr_t survival, uintptr_t stream) {
        check(cuda::confidence_head(
                  {requests, drafts, hidden_size, markov_size, pointer<float>(hidden), hidden_request, hidden_draft,
                   pointer<float>(markov), pointer<float>(weight), pointer<float>(temperatures), pointer<float>(logits),
                   pointer<float>(confidence), pointer<float>(survival)},
                  as_stream(stream)),
              "confidence_head");
      },
      NoGil(), py::arg("requests"), py::arg("drafts"), py::arg("hidden_size"), py::arg("markov_size"),
      py::arg("hidden"), py::arg("hidden_request"), py::arg("hidden_draft"), py::arg("markov"), py::arg("weight"),
      py::arg("temperatures"), py::arg("logits"), py::arg("confidence"), py::arg("survival"), py::arg("stream"));
}
