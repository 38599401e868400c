#include "cpu/ceilings.hpp"
#include "kernel_core/bindings.hpp"

namespace kernel_core {

void bind_ceilings(pybind11::module_& m) {
  m.def(
      "read_all", [](uintptr_t x, int64_t n) { return KERNEL_CORE_PICK(read_all)(pointer<const float>(x), n); },
      NoGil());
  m.def(
      "copy_all",
      [](uintptr_t from, uintptr_t to, int64_t n) {
        KERNEL_CORE_PICK(copy_all)(pointer<const float>(from), pointer<float>(to), n);
      },
      NoGil());
  m.def(
      "fma_flops",
      [](int64_t rounds) {
        float sink = 0;
        return KERNEL_CORE_PICK(fma_flops)(rounds, &sink);
      },
      NoGil());
  // 0 where the CPU has no tile unit
  m.def(
      "amx_bf16_flops",
      [](int64_t rounds) -> int64_t {
#ifdef KERNEL_CORE_HAS_AMX
        float sink = 0;
        if (detect_isa() >= Isa::amx) return amx::bf16_flops(rounds, &sink);
#endif
        return static_cast<int64_t>(0 * rounds);
      },
      NoGil());
}

}  // namespace kernel_core
