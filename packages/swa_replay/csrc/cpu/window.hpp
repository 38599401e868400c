// Window attention, and the way of a step's rows into the rings.
#pragma once

#include "kernel_core/attention/args.hpp"
#include "kernel_core/isa.hpp"

namespace swa_replay {

KERNEL_CORE_DECLARE(void, window_attention, (const kernel_core::AttentionArgs&))
#if KERNEL_CORE_X86
namespace amx {
void window_attention(const kernel_core::AttentionArgs&);
}
#endif

}  // namespace swa_replay
