#include "amx_product.hpp"
#include "experts_driver.hpp"
#include "kernels.hpp"

namespace mega_moe {
namespace amx {

void fused_experts(const ExpertsArgs& a) { ExpertsDriver<AmxProduct>(a).run(); }

}  // namespace amx
}  // namespace mega_moe
