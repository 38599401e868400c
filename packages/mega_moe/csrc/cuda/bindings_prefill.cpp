// The experts for many tokens, for Python.
#include <pybind11/pybind11.h>

#include <tuple>

#include "cuda/sm90/expert_prefill_params.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;
using namespace mega_moe::sm90;

void bind_prefill(py::module_& m) {
  m.def(
      "prefill_sizes",
      [](int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool fp8, bool parts_are_float) {
        const PrefillSizes s = prefill_sizes(tokens, slots, d, inter, experts, fp8, parts_are_float);
        return std::tuple(s.images, s.hidden, s.parts, s.expanded13, s.expanded2);
      },
      py::arg("tokens"), py::arg("slots"), py::arg("d"), py::arg("inter"), py::arg("experts"), py::arg("fp8"),
      py::arg("parts_are_float"));
  m.def(
      "prefill",
      [](uintptr_t x, bool x_is_float, int tokens, int slots, int d, int inter, int experts, uintptr_t ids,
         uintptr_t weights, uintptr_t offsets, uintptr_t rows, uintptr_t w13, uintptr_t w2, uintptr_t scale13,
         uintptr_t scale2, float limit, uintptr_t out, bool out_is_float, uintptr_t images, uintptr_t hidden,
         uintptr_t parts, bool parts_are_float, uintptr_t expanded13, uintptr_t expanded2, int lag, int steps, int tile,
         int ctas, uintptr_t stream) {
        check(prefill({.x = pointer<const void>(x),
                       .x_is_float = x_is_float,
                       .tokens = tokens,
                       .slots = slots,
                       .d = d,
                       .inter = inter,
                       .experts = experts,
                       .ids = pointer<const int32_t>(ids),
                       .weights = pointer<const float>(weights),
                       .offsets = pointer<const int32_t>(offsets),
                       .rows = pointer<const int32_t>(rows),
                       .w13 = pointer<const uint8_t>(w13),
                       .w2 = pointer<const uint8_t>(w2),
                       .scale13 = pointer<const float>(scale13),
                       .scale2 = pointer<const float>(scale2),
                       .limit = limit,
                       .out = pointer<void>(out),
                       .out_is_float = out_is_float,
                       .images = pointer<uint8_t>(images),
                       .hidden = pointer<uint8_t>(hidden),
                       .parts = pointer<void>(parts),
                       .parts_are_float = parts_are_float,
                       .expanded13 = pointer<uint8_t>(expanded13),
                       .expanded2 = pointer<uint8_t>(expanded2),
                       .lag = lag,
                       .steps = steps},
                      tile, ctas, as_stream(stream)),
              "prefill");
      },
      NoGil(), py::arg("x"), py::arg("x_is_float"), py::arg("tokens"), py::arg("slots"), py::arg("d"), py::arg("inter"),
      py::arg("experts"), py::arg("ids"), py::arg("weights"), py::arg("offsets"), py::arg("rows"), py::arg("w13"),
      py::arg("w2"), py::arg("scale13"), py::arg("scale2"), py::arg("limit"), py::arg("out"), py::arg("out_is_float"),
      py::arg("images"), py::arg("hidden"), py::arg("parts"), py::arg("parts_are_float"), py::arg("expanded13"),
      py::arg("expanded2"), py::arg("lag"), py::arg("steps"), py::arg("tile"), py::arg("ctas"), py::arg("stream"));
}
