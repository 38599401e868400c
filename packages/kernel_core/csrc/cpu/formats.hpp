// Declarations of the row codecs at each instruction set. Strides are in bytes between rows.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace kernel_core {

KERNEL_CORE_DECLARE(void, quantize_main, (const float* x, uint8_t* rows, int64_t count, int64_t width))
KERNEL_CORE_DECLARE(void, dequantize_main, (const uint8_t* rows, float* x, int64_t count, int64_t width))
KERNEL_CORE_DECLARE(void, quantize_mxfp8,
                    (const float* x, uint8_t* codes, uint8_t* scales, int64_t count, int64_t width, int64_t code_stride,
                     int64_t scale_stride))
KERNEL_CORE_DECLARE(void, dequantize_mxfp8,
                    (const uint8_t* codes, const uint8_t* scales, float* x, int64_t count, int64_t width,
                     int64_t code_stride, int64_t scale_stride))
KERNEL_CORE_DECLARE(void, quantize_mxfp4,
                    (const float* x, uint8_t* codes, uint8_t* scales, int64_t count, int64_t width, int64_t code_stride,
                     int64_t scale_stride))
KERNEL_CORE_DECLARE(void, dequantize_mxfp4,
                    (const uint8_t* codes, const uint8_t* scales, float* x, int64_t count, int64_t width,
                     int64_t code_stride, int64_t scale_stride))
KERNEL_CORE_DECLARE(void, quantize_fp8_block,
                    (const float* w, uint8_t* codes, uint8_t* scales, int64_t rows, int64_t cols))
KERNEL_CORE_DECLARE(void, dequantize_fp8_block,
                    (const uint8_t* codes, const uint8_t* scales, float* w, int64_t rows, int64_t cols))
// format 0: E2M1 (one code a byte), 1: E4M3, 2: UE8M0
KERNEL_CORE_DECLARE(void, encode_elements, (int format, const float* x, uint8_t* codes, int64_t count))

}  // namespace kernel_core
