// The entry points of each instruction set.
#pragma once

#include "kernel_core/isa.hpp"
#include "matrix.hpp"

namespace mega_moe {

KERNEL_CORE_DECLARE(void, linear, (const LinearArgs& a))
KERNEL_CORE_DECLARE(void, fused_experts, (const ExpertsArgs& a))
KERNEL_CORE_DECLARE(void, route, (const RouteArgs& a))

#if defined(KERNEL_CORE_HAS_AMX)
namespace amx {
void linear(const LinearArgs& a);
void fused_experts(const ExpertsArgs& a);
}  // namespace amx
#define MEGA_MOE_PICK_AMX(name) \
  (::kernel_core::Variants<decltype(&scalar::name)>{&scalar::name, &avx2::name, &avx512::name, &amx::name}.pick())
#else
#define MEGA_MOE_PICK_AMX(name) KERNEL_CORE_PICK(name)
#endif

}  // namespace mega_moe
