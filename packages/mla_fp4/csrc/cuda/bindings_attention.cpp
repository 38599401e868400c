// Sparse attention of the CUDA module.
#include <pybind11/pybind11.h>

#include "cuda/dispatch.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;

void bind_attention(py::module_& m) {
  using namespace mla_fp4::cuda;
  m.def("attention_heads_of_cta", &attention_heads_of_cta, py::arg("rows"), py::arg("heads"),
        py::arg("multiprocessors"));
  m.def(
      "sparse_attention",
      [](uintptr_t q, uintptr_t new_rows, uintptr_t ring, uintptr_t ring_slot, uintptr_t cu_seqlens,
         uintptr_t start_pos, uintptr_t lower, uintptr_t pages, uintptr_t block_table, uintptr_t indices,
         uintptr_t sink, uintptr_t rope, uintptr_t out, int64_t rows, int64_t heads, int64_t batch, int64_t slots,
         int64_t ring_rows, int64_t window, int64_t blocks, int64_t rows_per_block, int64_t table_width,
         int64_t selected, float scale, int64_t heads_of_cta, int64_t multiprocessors, uintptr_t stream) {
        const AttentionParams params = {.q = pointer<const void>(q),
                                        .out = pointer<void>(out),
                                        .rows = rows,
                                        .heads = heads,
                                        .cu_seqlens = pointer<const int32_t>(cu_seqlens),
                                        .start_pos = pointer<const int64_t>(start_pos),
                                        .batch = batch,
                                        .new_rows = pointer<const uint8_t>(new_rows),
                                        .ring = pointer<const uint8_t>(ring),
                                        .slots = slots,
                                        .ring_rows = ring_rows,
                                        .ring_slot = pointer<const int32_t>(ring_slot),
                                        .lower = pointer<const int64_t>(lower),
                                        .window = window,
                                        .indices = pointer<const int32_t>(indices),
                                        .selected = selected,
                                        .pages = pointer<const uint8_t>(pages),
                                        .blocks = blocks,
                                        .rows_per_block = rows_per_block,
                                        .block_table = pointer<const int32_t>(block_table),
                                        .table_width = table_width,
                                        .sink = pointer<const float>(sink),
                                        .rope = pointer<const float>(rope),
                                        .scale = scale};
        if (heads_of_cta == 0) heads_of_cta = attention_heads_of_cta(rows, heads, multiprocessors);
        check(attention_on_device(params, heads_of_cta, multiprocessors, as_stream(stream)), "sparse_attention");
      },
      NoGil(), py::arg("q"), py::arg("new_rows"), py::arg("ring"), py::arg("ring_slot"), py::arg("cu_seqlens"),
      py::arg("start_pos"), py::arg("lower"), py::arg("pages"), py::arg("block_table"), py::arg("indices"),
      py::arg("sink"), py::arg("rope"), py::arg("out"), py::arg("rows"), py::arg("heads"), py::arg("batch"),
      py::arg("slots"), py::arg("ring_rows"), py::arg("window"), py::arg("blocks"), py::arg("rows_per_block"),
      py::arg("table_width"), py::arg("selected"), py::arg("scale"), py::arg("heads_of_cta") = 0,
      py::arg("multiprocessors") = 132, py::arg("stream") = 0);
}
