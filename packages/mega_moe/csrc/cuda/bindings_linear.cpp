// FP8 products of few rows for Python.
#include <pybind11/pybind11.h>

#include "cuda/linear.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;
using namespace mega_moe::cuda;

void bind_linear(py::module_& m) {
  // Warps, tile and stages; a tile of 0: no kernel takes these sizes
  m.def(
      "linear_shape",
      [](int64_t tokens, int64_t groups, int64_t rows, int64_t columns, int terms, int cluster,
         int64_t multiprocessors) {
        const LinearShape shape = linear_shape({tokens, groups, rows, columns, nullptr, nullptr, nullptr, nullptr},
                                               terms, cluster, multiprocessors);
        return std::tuple<int, int, int>(shape.warps, shape.tile, shape.stages);
      },
      py::arg("tokens"), py::arg("groups"), py::arg("rows"), py::arg("columns"), py::arg("terms"), py::arg("cluster"),
      py::arg("multiprocessors"));
  m.def(
      "linear",
      [](int64_t tokens, int64_t groups, int64_t rows, int64_t columns, uintptr_t x, uintptr_t weight, uintptr_t scale,
         uintptr_t out, int terms, int cluster, int warps, int tile, int stages, uintptr_t stream) {
        check(linear({tokens, groups, rows, columns, pointer<const float>(x), pointer<const uint8_t>(weight),
                      pointer<const uint8_t>(scale), pointer<float>(out)},
                     {terms, cluster, warps, tile, stages}, as_stream(stream)),
              "linear");
      },
      NoGil(), py::arg("tokens"), py::arg("groups"), py::arg("rows"), py::arg("columns"), py::arg("x"),
      py::arg("weight"), py::arg("scale"), py::arg("out"), py::arg("terms"), py::arg("cluster"), py::arg("warps"),
      py::arg("tile"), py::arg("stages"), py::arg("stream"));
}
