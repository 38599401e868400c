// The CUDA module: device pointers, sizes and a stream as integers. Nothing here waits for the device.
#include <pybind11/pybind11.h>

#include "cuda/ring_store.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

PYBIND11_MODULE(_cuda, m) {
  m.def(
      "store_window",
      [](uintptr_t new_rows, uintptr_t ring, uintptr_t slot, uintptr_t cu, uintptr_t start, uintptr_t floor,
         int64_t rows, int64_t row_bytes, int64_t batch, int64_t slots, int64_t ring_rows, uintptr_t stream) {
        const auto status = swa_replay::cuda::ring_store(
            {pointer<const uint8_t>(new_rows), pointer<uint8_t>(ring), pointer<const int32_t>(slot),
             pointer<const int32_t>(cu), pointer<const int64_t>(start), pointer<const int64_t>(floor), rows, row_bytes,
             batch, slots, ring_rows},
            kernel_core::cuda::as_stream(stream));
        kernel_core::cuda::check(status, "store_window");
      },
      NoGil(), py::arg("new_rows"), py::arg("ring"), py::arg("ring_slot"), py::arg("cu_seqlens"), py::arg("start_pos"),
      py::arg("floor"), py::arg("rows"), py::arg("row_bytes"), py::arg("batch"), py::arg("slots"), py::arg("ring_rows"),
      py::arg("stream"));
}
