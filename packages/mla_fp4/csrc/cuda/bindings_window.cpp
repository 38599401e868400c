// Window prefill of the CUDA module.
#include <pybind11/pybind11.h>

#include "cuda/window_prefill.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;

void bind_window(py::module_& m) {
  using namespace mla_fp4::cuda;
  m.def("window_run_rows", &window_run_rows, py::arg("rows"), py::arg("heads"), py::arg("batch"),
        py::arg("multiprocessors"));
  m.def(
      "window_prefill",
      [](uintptr_t q, uintptr_t new_rows, uintptr_t ring, uintptr_t ring_slot, uintptr_t cu_seqlens,
         uintptr_t start_pos, uintptr_t lower, uintptr_t sink, uintptr_t rope, uintptr_t out, int64_t rows,
         int64_t heads, int64_t batch, int64_t slots, int64_t ring_rows, int64_t window, float scale, int64_t run_rows,
         uintptr_t stream) {
        const WindowParams params = {.q = pointer<const void>(q),
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
                                     .sink = pointer<const float>(sink),
                                     .rope = pointer<const float>(rope),
                                     .scale = scale,
                                     .run_rows = run_rows};
        check(window_prefill(params, as_stream(stream)), "window_prefill");
      },
      NoGil(), py::arg("q"), py::arg("new_rows"), py::arg("ring"), py::arg("ring_slot"), py::arg("cu_seqlens"),
      py::arg("start_pos"), py::arg("lower"), py::arg("sink"), py::arg("rope"), py::arg("out"), py::arg("rows"),
      py::arg("heads"), py::arg("batch"), py::arg("slots"), py::arg("ring_rows"), py::arg("window"), py::arg("scale"),
      py::arg("run_rows"), py::arg("stream") = 0);
}
