// Attention over window and selected rows.
#pragma once

#include "kernel_core/attention/args.hpp"
#include "kernel_core/isa.hpp"

namespace mla_fp4 {

KERNEL_CORE_DECLARE(void, sparse_attention, (const kernel_core::AttentionArgs&))

}  // namespace mla_fp4
