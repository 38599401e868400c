#include "cpu/norm.hpp"

#include "cpu/norm_row.hpp"
#include "kernel_core/parallel.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

void norm_rope(const NormArgs& a) {
  kernel_core::parallel_for(a.rows, a.group * a.d * 2, [&](int64_t row) {
    const float* angles = a.rope ? a.rope + row * a.rope_dim : nullptr;
    for (int64_t g = 0; g < a.group; ++g) {
      const int64_t at = (row * a.group + g) * a.d;
      norm_row(a.x + at, a.weight, a.eps, a.out + at, a.d);
      if (angles) rotate_row(a.out + at + a.d - a.rope_dim, angles, a.rope_dim, a.inverse);
    }
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
