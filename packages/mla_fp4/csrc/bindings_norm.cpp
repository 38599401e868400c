#include "bindings.hpp"
#include "cpu/norm.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

void bind_norm(py::module_& m) {
  m.def(
      "norm_rope",
      [](uintptr_t x, uintptr_t weight, uintptr_t rope, uintptr_t out, int64_t rows, int64_t group, int64_t d,
         int64_t rope_dim, float eps, bool inverse) {
        using namespace mla_fp4;
        KERNEL_CORE_PICK(norm_rope)
        ({pointer<const float>(x), pointer<const float>(weight), pointer<const float>(rope), pointer<float>(out), rows,
          group, d, rope_dim, eps, inverse});
      },
      NoGil());
}
