// The experts for Python.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "cuda/sm90/expert_params.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;
using namespace mega_moe::sm90;

namespace {

// `tables`: addresses on the host, [x, weights, parts, flags][rank]; not read for one rank.
Ranks ranks(int world, int rank, int rows, bool met, const uint64_t* tables) {
  if (world < 1 || world > kMostRanks) throw std::invalid_argument("world: got " + std::to_string(world));
  Ranks out{.world = world, .rank = rank, .rows = rows, .met = met, .x = {}, .weights = {}, .parts = {}, .flags = {}};
  for (int i = 0; world > 1 && i < world; ++i) {
    out.x[i] = pointer<const void>(tables[i]);
    out.weights[i] = pointer<const float>(tables[world + i]);
    out.parts[i] = pointer<float>(tables[2 * world + i]);
    out.flags[i] = pointer<int32_t>(tables[3 * world + i]);
  }
  return out;
}

}  // namespace

void bind_experts(py::module_& m) {
  m.def(
      "experts_sizes",
      [](int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool shared, int columns) {
        const ExpertsSizes s = experts_sizes(tokens, slots, d, inter, experts, shared, columns);
        return std::tuple(s.images, s.hidden, s.parts, s.state);
      },
      py::arg("tokens"), py::arg("slots"), py::arg("d"), py::arg("inter"), py::arg("experts"), py::arg("shared"),
      py::arg("columns"));
  m.def(
      "experts",
      [](uintptr_t x, bool x_is_float, int tokens, int slots, int d, int inter, int experts_, uintptr_t ids,
         uintptr_t weights, uintptr_t offsets, uintptr_t rows, uintptr_t w13, uintptr_t w2, uintptr_t places,
         uintptr_t scale13, uintptr_t scale2, uintptr_t shared13, uintptr_t shared2, int shared_format, float limit,
         uintptr_t out, bool out_is_float, uintptr_t images, uintptr_t hidden, uintptr_t parts, uintptr_t state,
         int parts_of_work, int world, int rank, int rows_of_rank, bool met, uintptr_t tables, int columns, int variant,
         int ctas, uintptr_t stream) {
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
                       .places = pointer<const int32_t>(places),
                       .scale13 = pointer<const float>(scale13),
                       .scale2 = pointer<const float>(scale2),
                       .shared13 = pointer<const uint8_t>(shared13),
                       .shared2 = pointer<const uint8_t>(shared2),
                       .shared_format = shared_format,
                       .limit = limit,
                       .out = pointer<void>(out),
                       .out_is_float = out_is_float,
                       .images = pointer<uint8_t>(images),
                       .hidden = pointer<uint8_t>(hidden),
                       .parts = pointer<float>(parts),
                       .state = pointer<int32_t>(state),
                       .ranks = ranks(world, rank, rows_of_rank, met, pointer<const uint64_t>(tables)),
                       .parts_of_work = parts_of_work},
                      columns, variant, ctas, as_stream(stream)),
              "experts");
      },
      NoGil(), py::arg("x"), py::arg("x_is_float"), py::arg("tokens"), py::arg("slots"), py::arg("d"), py::arg("inter"),
      py::arg("experts"), py::arg("ids"), py::arg("weights"), py::arg("offsets"), py::arg("rows"), py::arg("w13"),
      py::arg("w2"), py::arg("places") = 0, py::arg("scale13"), py::arg("scale2"), py::arg("shared13"),
      py::arg("shared2"), py::arg("shared_format"), py::arg("limit"), py::arg("out"), py::arg("out_is_float"),
      py::arg("images"), py::arg("hidden"), py::arg("parts"), py::arg("state"), py::arg("parts_of_work") = 15,
      py::arg("world") = 1, py::arg("rank") = 0, py::arg("rows_of_rank") = 0, py::arg("met") = false,
      py::arg("tables") = 0, py::arg("columns"), py::arg("variant") = 0, py::arg("ctas"), py::arg("stream"));
}
