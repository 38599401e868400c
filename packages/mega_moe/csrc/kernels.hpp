// The entry points of each instruction set.
#pragma once

#include "kernel_core/isa.hpp"
#include "matrix.hpp"

namespace mega_moe {

KERNEL_CORE_DECLARE(void, linear, (const LinearArgs& a))
KERNEL_CORE_DECLARE(void, fused_experts, (const ExpertsArgs& a))
KERNEL_CORE_DECLARE(void, route, (const RouteArgs& a))

}  // namespace mega_moe
