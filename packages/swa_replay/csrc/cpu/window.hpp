// Window attention, and the way of a step's rows into the rings.
#pragma once

#include "kernel_core/attention/args.hpp"
#include "kernel_core/isa.hpp"

namespace swa_replay {

KERNEL_CORE_DECLARE(void, window_attention, (const kernel_core::AttentionArgs&))

}  // namespace swa_replay
