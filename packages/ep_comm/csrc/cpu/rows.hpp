// Rows of channels, at each instruction set. `narrow` says that the input is bfloat16 rather than float32.
#pragma once

#include "ep_comm/layout.hpp"
#include "kernel_core/isa.hpp"

namespace ep_comm {

// A token's channels in the dispatch format; `scales` is written with fp8 only.
KERNEL_CORE_DECLARE(void, encode_row,
                    (const void* x, bool narrow, uint8_t* channels, uint8_t* scales, Format format, int64_t hidden))
// A result in the combine format.
KERNEL_CORE_DECLARE(void, round_row, (const void* y, bool narrow, uint8_t* to, Format format, int64_t hidden))
// sum += row
KERNEL_CORE_DECLARE(void, add_row, (const uint8_t* row, Format format, float* sum, int64_t hidden))

}  // namespace ep_comm
