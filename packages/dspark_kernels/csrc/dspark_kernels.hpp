// The CPU kernels of this package.
#pragma once

#include "arguments.hpp"
#include "kernel_core/isa.hpp"

namespace dspark_kernels {

KERNEL_CORE_DECLARE(void, sample, (const Sample&))
KERNEL_CORE_DECLARE(void, top_logprobs, (const TopLogprobs&))
KERNEL_CORE_DECLARE(void, token_mask, (const TokenMask&))
KERNEL_CORE_DECLARE(void, confidence_head, (const ConfidenceHead&))
KERNEL_CORE_DECLARE(void, draft_step, (const DraftStep&))
KERNEL_CORE_DECLARE(void, verify, (const Verify&))

}  // namespace dspark_kernels
