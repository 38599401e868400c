// The router and the permutation for Python.
#include <pybind11/pybind11.h>

#include "cuda/route.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;
using namespace mega_moe::cuda;

void bind_route(py::module_& m) {
  m.def(
      "route",
      [](int64_t tokens, int64_t experts, int64_t top_k, uintptr_t logits, uintptr_t bias, uintptr_t bias_vl,
         uintptr_t is_image, float scale, uintptr_t ids, uintptr_t weights, uintptr_t stream) {
        check(route({tokens, experts, top_k, pointer<const float>(logits), pointer<const float>(bias),
                     pointer<const float>(bias_vl), pointer<const uint8_t>(is_image), scale, pointer<int32_t>(ids),
                     pointer<float>(weights)},
                    as_stream(stream)),
              "route");
      },
      NoGil(), py::arg("tokens"), py::arg("experts"), py::arg("top_k"), py::arg("logits"), py::arg("bias"),
      py::arg("bias_vl"), py::arg("is_image"), py::arg("scale"), py::arg("ids"), py::arg("weights"), py::arg("stream"));
  m.def("permute_workspace", &permute_workspace, py::arg("tokens"), py::arg("top_k"), py::arg("experts"));
  m.def(
      "permute",
      [](int64_t tokens, int64_t experts, int64_t top_k, uintptr_t ids, bool shared, uintptr_t offsets, uintptr_t rows,
         uintptr_t workspace, uintptr_t stream) {
        check(permute({tokens, experts, top_k, pointer<const int32_t>(ids), shared, pointer<int32_t>(offsets),
                       pointer<int32_t>(rows)},
                      pointer<void>(workspace), as_stream(stream)),
              "permute");
      },
      NoGil(), py::arg("tokens"), py::arg("experts"), py::arg("top_k"), py::arg("ids"), py::arg("shared"),
      py::arg("offsets"), py::arg("rows"), py::arg("workspace"), py::arg("stream"));
  m.def(
      "route_permute",
      [](int64_t tokens, int64_t experts, int64_t top_k, uintptr_t logits, uintptr_t bias, uintptr_t bias_vl,
         uintptr_t is_image, float scale, uintptr_t ids, uintptr_t weights, bool shared, uintptr_t offsets,
         uintptr_t rows, uintptr_t ticket, uintptr_t stream) {
        const RouteParams a = {tokens,
                               experts,
                               top_k,
                               pointer<const float>(logits),
                               pointer<const float>(bias),
                               pointer<const float>(bias_vl),
                               pointer<const uint8_t>(is_image),
                               scale,
                               pointer<int32_t>(ids),
                               pointer<float>(weights)};
        const PermuteParams p = {
            tokens, experts, top_k, a.ids, shared, pointer<int32_t>(offsets), pointer<int32_t>(rows)};
        check(route_permute(a, p, pointer<int32_t>(ticket), as_stream(stream)), "route_permute");
      },
      NoGil(), py::arg("tokens"), py::arg("experts"), py::arg("top_k"), py::arg("logits"), py::arg("bias"),
      py::arg("bias_vl"), py::arg("is_image"), py::arg("scale"), py::arg("ids"), py::arg("weights"), py::arg("shared"),
      py::arg("offsets"), py::arg("rows"), py::arg("ticket"), py::arg("stream"));
}
