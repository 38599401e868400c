#include "kernels.hpp"
#include "linear_driver.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

void linear(const LinearArgs& a) { linear_rows(a); }

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
