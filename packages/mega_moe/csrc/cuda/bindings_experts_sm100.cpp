// The experts of SM100 for Python.
#include <pybind11/pybind11.h>

#include <tuple>

#include "cuda/sm100/expert_params_sm100.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;

void bind_experts_sm100(py::module_& m) {
  using namespace mega_moe::sm100;
  m.def(
      "experts_sm100_sizes",
      [](int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool shared, int tile) {
        const ExpertsSizes s = experts_sizes(tokens, slots, d, inter, experts, shared, tile);
        return std::tuple(s.images, s.hidden, s.parts);
      },
      py::arg("tokens"), py::arg("slots"), py::arg("d"), py::arg("inter"), py::arg("experts"), py::arg("shared"),
      py::arg("tile"));
  m.def(
      "experts_sm100",
      [](uintptr_t x, bool x_is_float, int tokens, int slots, int d, int inter, int experts_, uintptr_t ids,
         uintptr_t weights, uintptr_t offsets, uintptr_t rows, uintptr_t w13, uintptr_t w2, uintptr_t shared13,
         uintptr_t shared2, uintptr_t scale13, uintptr_t scale2, float limit, uintptr_t out, bool out_is_float,
         uintptr_t images, uintptr_t hidden, uintptr_t parts, int tile, int ctas, int grid, uintptr_t stream) {
        check(experts({.x = pointer<const void>(x),
                       .x_is_float = x_is_float,
                       .tokens = tokens,
                       .slots = slots,
                       .d = d,
                       .inter = inter,
                       .experts = experts_,
                       .ids = pointer<const int32_t>(ids),
                       .weights = pointer<const float>(weights),
                       .offsets = pointer<const int32_t>(offsets),
                       .rows = pointer<const int32_t>(rows),
                       .w13 = pointer<const uint8_t>(w13),
                       .w2 = pointer<const uint8_t>(w2),
                       .shared13 = pointer<const uint8_t>(shared13),
                       .shared2 = pointer<const uint8_t>(shared2),
                       .scale13 = pointer<const uint8_t>(scale13),
                       .scale2 = pointer<const uint8_t>(scale2),
                       .limit = limit,
                       .out = pointer<void>(out),
                       .out_is_float = out_is_float,
                       .images = pointer<uint8_t>(images),
                       .hidden = pointer<uint8_t>(hidden),
                       .parts = pointer<float>(parts)},
                      tile, ctas, grid, as_stream(stream)),
              "experts_sm100");
      },
      NoGil(), py::arg("x"), py::arg("x_is_float"), py::arg("tokens"), py::arg("slots"), py::arg("d"), py::arg("inter"),
      py::arg("experts"), py::arg("ids"), py::arg("weights"), py::arg("offsets"), py::arg("rows"), py::arg("w13"),
      py::arg("w2"), py::arg("shared13"), py::arg("shared2"), py::arg("scale13"), py::arg("scale2"), py::arg("limit"),
      py::arg("out"), py::arg("out_is_float"), py::arg("images"), py::arg("hidden"), py::arg("parts"), py::arg("tile"),
      py::arg("ctas"), py::arg("grid"), py::arg("stream"));
}
