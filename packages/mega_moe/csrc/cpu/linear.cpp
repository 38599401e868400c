#include "kernels.hpp"

#include "fma_product.hpp"
#include "kernel_core/parallel.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

void linear(const LinearArgs& a) {
  const int64_t panels = (a.out + FmaProduct::kPanel - 1) / FmaProduct::kPanel;
  kernel_core::parallel_for(a.groups * panels, FmaProduct::kPanel * a.w.k * (2 + a.tokens) / 16, [&](int64_t item) {
    const int64_t g = item / panels, o = item % panels * FmaProduct::kPanel;
    FmaProduct::run_rows(a.w, g * a.out + o, std::min<int64_t>(FmaProduct::kPanel, a.out - o), a.x + g * a.w.k,
                         a.groups * a.w.k, a.tokens, a.y + g * a.out + o, a.groups * a.out);
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
