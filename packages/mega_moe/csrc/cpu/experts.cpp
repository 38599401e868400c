#include "kernels.hpp"

#include "experts_driver.hpp"
#include "fma_product.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

void fused_experts(const ExpertsArgs& a) { ExpertsDriver<FmaProduct>(a).run(); }

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
