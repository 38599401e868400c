#include "cpu/compressor.hpp"

#include "kernel_core/parallel.hpp"
#include "kernel_core/simd.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

using namespace kernel_core::KERNEL_CORE_ISA;

void pool_pairs(const PoolArgs& a) {
  constexpr int w = F32::width;
  kernel_core::parallel_for(a.count, a.d * 8, [&](int64_t g) {
    const Pair& p = a.pairs[g];
    float* out = a.out + g * a.d;
    for (int64_t i = 0; i < a.d; i += w) {
      const int n = static_cast<int>(a.d - i < w ? a.d - i : w);
      const F32 g0 = F32::load_n(p.gate0 + i, n), g1 = F32::load_n(p.gate1 + i, n);
      const F32 top = max(g0, g1);
      const F32 e0 = exp(g0 - top), e1 = exp(g1 - top);
      const F32 weighted = fma(e0, F32::load_n(p.kv0 + i, n), e1 * F32::load_n(p.kv1 + i, n));
      (weighted / (e0 + e1)).store_n(out + i, n);
    }
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
