// The CPU module: copies of many pieces without the interpreter lock.
#include <pybind11/pybind11.h>

#include <cstring>

#include "kernel_core/bindings.hpp"
#include "order_ids.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
  // Arrays of `count` addresses and sizes. Pieces do not overlap, so their order is free; one thread copies them in
  // theirs.
  m.def(
      "copy_pieces",
      [](uintptr_t targets, uintptr_t sources, uintptr_t sizes, int64_t count) {
        const auto* to = pointer<const uint64_t>(targets);
        const auto* from = pointer<const uint64_t>(sources);
        const auto* bytes = pointer<const uint64_t>(sizes);
        for (int64_t i = 0; i < count; ++i) std::memcpy(pointer<void>(to[i]), pointer<const void>(from[i]), bytes[i]);
      },
      NoGil(), py::arg("targets"), py::arg("sources"), py::arg("sizes"), py::arg("count"));
  // Keeps the interpreter lock: microseconds, which giving it up could turn into milliseconds.
  m.def(
      "order_ids",
      [](uintptr_t slots, uintptr_t blocks, int64_t count, int64_t slot_end, int64_t block_end, uintptr_t sorted_slots,
         uintptr_t sorted_blocks) {
        return gdr_swapin::order_ids(pointer<const int64_t>(slots), pointer<const int64_t>(blocks), count, slot_end,
                                     block_end, pointer<int64_t>(sorted_slots), pointer<int64_t>(sorted_blocks));
      },
      py::arg("slots"), py::arg("blocks"), py::arg("count"), py::arg("slot_end"), py::arg("block_end"),
      py::arg("sorted_slots"), py::arg("sorted_blocks"));
}
