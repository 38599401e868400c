// Index scores and selections of the CUDA module.
#include <pybind11/pybind11.h>

#include "cuda/dispatch.hpp"
#include "cuda/index_topk.hpp"
#include "cuda/topk.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;

void bind_index(py::module_& m) {
  using namespace mla_fp4::cuda;
  m.def("index_score_workspace", &index_workspace_on_device, py::arg("rows"), py::arg("heads"));
  m.def(
      "index_score",
      [](uintptr_t q, uintptr_t weights, bool q_is_bf16, int64_t rows, int64_t heads, uintptr_t pages, int64_t blocks,
         int64_t rows_per_block, uintptr_t table, int64_t table_width, uintptr_t cu, int64_t batch, uintptr_t visible,
         int64_t longest_request, int64_t width, uintptr_t candidates, int64_t candidates_width,
         int64_t candidate_block, uintptr_t scores, int64_t stride, bool fill_hidden, uintptr_t maxima,
         int64_t maxima_stride, uintptr_t workspace, uintptr_t stream, int variant) {
        check(index_score_on_device({.q = pointer<const void>(q),
                                     .weights = pointer<const float>(weights),
                                     .q_is_bf16 = q_is_bf16,
                                     .rows = rows,
                                     .heads = heads,
                                     .pages = pointer<const uint8_t>(pages),
                                     .blocks = blocks,
                                     .rows_per_block = rows_per_block,
                                     .block_table = pointer<const int32_t>(table),
                                     .table_width = table_width,
                                     .cu_seqlens = pointer<const int32_t>(cu),
                                     .batch = batch,
                                     .visible = pointer<const int32_t>(visible),
                                     .longest_request = longest_request,
                                     .width = width,
                                     .candidates = pointer<const int32_t>(candidates),
                                     .candidates_width = candidates_width,
                                     .candidate_block = candidate_block,
                                     .scores = pointer<float>(scores),
                                     .stride = stride,
                                     .fill_hidden = fill_hidden,
                                     .maxima = pointer<float>(maxima),
                                     .maxima_stride = maxima_stride,
                                     .workspace = pointer<void>(workspace),
                                     .variant = variant},
                                    as_stream(stream)),
              "index_score");
      },
      NoGil(), py::kw_only(), py::arg("q"), py::arg("weights"), py::arg("q_is_bf16"), py::arg("rows"), py::arg("heads"),
      py::arg("pages"), py::arg("blocks"), py::arg("rows_per_block"), py::arg("block_table"), py::arg("table_width"),
      py::arg("cu_seqlens"), py::arg("batch"), py::arg("visible"), py::arg("longest_request"), py::arg("width"),
      py::arg("candidates") = 0, py::arg("candidates_width") = 0, py::arg("candidate_block") = 1, py::arg("scores") = 0,
      py::arg("stride") = 0, py::arg("fill_hidden") = false, py::arg("maxima") = 0, py::arg("maxima_stride") = 0,
      py::arg("workspace"), py::arg("stream"), py::arg("variant") = 0);
  m.def("topk_slices", &topk_slices, py::arg("rows"), py::arg("width"), py::arg("k"), py::arg("multiprocessors"));
  m.def("topk_workspace", &topk_workspace, py::arg("rows"), py::arg("k"), py::arg("slices"));
  m.def(
      "topk",
      [](uintptr_t scores, int64_t stride, uintptr_t lengths, int64_t rows, int64_t width, int64_t k, uintptr_t out,
         uintptr_t blocks, int64_t blocks_width, int64_t block, bool keep_last, uintptr_t workspace, int64_t slices,
         uintptr_t stream) {
        check(topk({.scores = pointer<const float>(scores),
                    .stride = stride,
                    .lengths = pointer<const int32_t>(lengths),
                    .rows = rows,
                    .width = width,
                    .k = k,
                    .out = pointer<int32_t>(out),
                    .blocks = pointer<const int32_t>(blocks),
                    .blocks_width = blocks_width,
                    .block = block,
                    .keep_last = keep_last,
                    .workspace = pointer<void>(workspace),
                    .slices = slices},
                   as_stream(stream)),
              "topk");
      },
      NoGil(), py::kw_only(), py::arg("scores"), py::arg("stride"), py::arg("lengths"), py::arg("rows"),
      py::arg("width"), py::arg("k"), py::arg("out"), py::arg("blocks") = 0, py::arg("blocks_width") = 0,
      py::arg("block") = 1, py::arg("keep_last") = false, py::arg("workspace") = 0, py::arg("slices") = 1,
      py::arg("stream"));
  m.def("index_topk_workspace", &index_topk_workspace, py::arg("rows"), py::arg("heads"), py::arg("width"),
        py::arg("k"), py::arg("scores") = int64_t{1} << 28);
  m.def(
      "index_topk",
      [](uintptr_t q, uintptr_t weights, bool q_is_bf16, int64_t rows, int64_t heads, uintptr_t pages, int64_t blocks,
         int64_t rows_per_block, uintptr_t table, int64_t table_width, uintptr_t cu, int64_t batch, uintptr_t visible,
         int64_t longest_request, int64_t width, uintptr_t candidates, int64_t candidates_width,
         int64_t candidate_block, int64_t k, uintptr_t out, uintptr_t workspace, int64_t workspace_bytes,
         uintptr_t stream) {
        check(index_topk({.score = {.q = pointer<const void>(q),
                                    .weights = pointer<const float>(weights),
                                    .q_is_bf16 = q_is_bf16,
                                    .rows = rows,
                                    .heads = heads,
                                    .pages = pointer<const uint8_t>(pages),
                                    .blocks = blocks,
                                    .rows_per_block = rows_per_block,
                                    .block_table = pointer<const int32_t>(table),
                                    .table_width = table_width,
                                    .cu_seqlens = pointer<const int32_t>(cu),
                                    .batch = batch,
                                    .visible = pointer<const int32_t>(visible),
                                    .longest_request = longest_request,
                                    .width = width,
                                    .candidates = pointer<const int32_t>(candidates),
                                    .candidates_width = candidates_width,
                                    .candidate_block = candidate_block},
                          .k = k,
                          .out = pointer<int32_t>(out),
                          .workspace = pointer<void>(workspace),
                          .workspace_bytes = workspace_bytes},
                         as_stream(stream)),
              "index_topk");
      },
      NoGil(), py::kw_only(), py::arg("q"), py::arg("weights"), py::arg("q_is_bf16"), py::arg("rows"), py::arg("heads"),
      py::arg("pages"), py::arg("blocks"), py::arg("rows_per_block"), py::arg("block_table"), py::arg("table_width"),
      py::arg("cu_seqlens"), py::arg("batch"), py::arg("visible"), py::arg("longest_request"), py::arg("width"),
      py::arg("candidates") = 0, py::arg("candidates_width") = 0, py::arg("candidate_block") = 1, py::arg("k"),
      py::arg("out"), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("stream"));
}
