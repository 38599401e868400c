// Attention over window and selected rows.
#pragma once

#include "kernel_core/attention/args.hpp"
#include "kernel_core/isa.hpp"

namespace mla_fp4 {

KERNEL_CORE_DECLARE(void, sparse_attention, (const kernel_core::AttentionArgs&))
#if KERNEL_CORE_X86
namespace amx {
void sparse_attention(const kernel_core::AttentionArgs&);
}
#endif

}  // namespace mla_fp4
