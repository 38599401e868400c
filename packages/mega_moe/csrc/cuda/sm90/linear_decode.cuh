// E4M3 weights to bfloat16 with their block's scale, and float32 as a sum of bfloat16 numbers. All exact.
#pragma once

#include "kernel_core/cuda/formats.cuh"

namespace mega_moe::cuda {

using namespace kernel_core::cuda;

// Whether one of the codes is NaN (0x7F or 0xFF), which decoding by shifts would take for 480.
KC_HD uint32_t e4m3_nan_bits(uint32_t codes) { return ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u; }

// 0x7FC0 in the halves of out[0..1] whose code is NaN.
KC_HD void put_e4m3_nans(uint32_t codes, uint32_t out[2]) {
  for (int i = 0; i < 4; ++i)
    if ((codes >> (8 * i) & 0x7F) == 0x7F) out[i / 2] |= 0x7FC0u << (i % 2 * 16);
}

// x = terms[0] + terms[1] + terms[2]; an infinity or NaN is the first alone.
KC_HD void split_bf16(float x, uint32_t terms[3]) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 3; ++i) {
    terms[i] = pack_bf16(x, 0.0f);
    const bool finite = (terms[i] & 0x7F80u) != 0x7F80u;
    x = finite ? add_rn(x, -bf16_float(terms[i])) : 0.0f;
  }
}

}  // namespace mega_moe::cuda
