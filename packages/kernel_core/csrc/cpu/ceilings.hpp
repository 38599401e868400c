// What this machine can do at best, measured: the denominators of every "fraction of the bound".
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace kernel_core {

KERNEL_CORE_DECLARE(float, read_all, (const float* x, int64_t n))
KERNEL_CORE_DECLARE(void, copy_all, (const float* from, float* to, int64_t n))
KERNEL_CORE_DECLARE(int64_t, fma_flops, (int64_t rounds, float* sink))

#ifdef KERNEL_CORE_HAS_AMX
namespace amx {
int64_t bf16_flops(int64_t rounds, float* sink);
}
#endif

}  // namespace kernel_core
