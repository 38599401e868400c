#include "amx_product.hpp"
#include "kernels.hpp"
#include "linear_driver.hpp"

namespace mega_moe {
namespace amx {

void linear(const LinearArgs& a) {
  if (a.w.format == Format::f32)  // not exact in bfloat16
    linear_rows(a);
  else
    linear_packed<AmxProduct>(a);
}

}  // namespace amx
}  // namespace mega_moe
