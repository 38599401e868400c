#include "kernel_core/bindings.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

namespace mega_moe {
namespace {

void bind_linear(uintptr_t x, uintptr_t w, uintptr_t scale, uintptr_t y, int64_t tokens, int64_t out, int64_t k,
                 int64_t groups, int format) {
  const LinearArgs a{
      pointer<const float>(x),
      {pointer<const void>(w), pointer<const uint8_t>(scale), groups * out, k, static_cast<Format>(format)},
      pointer<float>(y),
      tokens,
      out,
      groups};
  if (k == 0)
    std::fill_n(a.y, tokens * groups * out, 0.0f);  // empty sums
  else
    MEGA_MOE_PICK_AMX(linear)(a);
}

void bind_route(uintptr_t logits, uintptr_t bias, uintptr_t bias_vl, uintptr_t is_image, uintptr_t ids,
                uintptr_t weights, int64_t tokens, int64_t experts, int64_t top_k, float scale) {
  const RouteArgs a{pointer<const float>(logits),
                    pointer<const float>(bias),
                    pointer<const float>(bias_vl),
                    pointer<const uint8_t>(is_image),
                    pointer<int32_t>(ids),
                    pointer<float>(weights),
                    tokens,
                    experts,
                    top_k,
                    scale};
  KERNEL_CORE_PICK(route)(a);
}

void bind_fused_experts(uintptr_t x, uintptr_t ids, uintptr_t weights, uintptr_t y, int64_t tokens, int64_t top_k,
                        int64_t d, int64_t inter, int64_t experts, uintptr_t w13, uintptr_t s13, uintptr_t w2,
                        uintptr_t s2, int64_t shared_inter, uintptr_t shared_w13, uintptr_t shared_s13,
                        uintptr_t shared_w2, uintptr_t shared_s2, float limit) {
  const ExpertsArgs a{pointer<const float>(x),
                      pointer<const int32_t>(ids),
                      pointer<const float>(weights),
                      pointer<float>(y),
                      tokens,
                      top_k,
                      d,
                      inter,
                      experts,
                      pointer<const uint8_t>(w13),
                      pointer<const uint8_t>(s13),
                      pointer<const uint8_t>(w2),
                      pointer<const uint8_t>(s2),
                      shared_inter,
                      pointer<const uint8_t>(shared_w13),
                      pointer<const uint8_t>(shared_s13),
                      pointer<const uint8_t>(shared_w2),
                      pointer<const uint8_t>(shared_s2),
                      limit};
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    if (a.ids[i] < -1 || a.ids[i] >= experts)
      throw std::invalid_argument("ids: got " + std::to_string(a.ids[i]) + " at [" + std::to_string(i / top_k) + ", " +
                                  std::to_string(i % top_k) + "], allowed is -1 or an expert below " +
                                  std::to_string(experts));
  }
  MEGA_MOE_PICK_AMX(fused_experts)(a);
}

}  // namespace
}  // namespace mega_moe

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
  m.def("linear", &mega_moe::bind_linear, NoGil(), "x, weight, scale, y, tokens, out, k, groups, format");
  m.def("route", &mega_moe::bind_route, NoGil(),
        "logits, bias, bias_vl, is_image, ids, weights, tokens, experts, top_k, scale");
  m.def("fused_experts", &mega_moe::bind_fused_experts, NoGil(),
        "x, ids, weights, y, tokens, top_k, d, inter, experts, w13, s13, w2, s2, shared..., limit");
}
