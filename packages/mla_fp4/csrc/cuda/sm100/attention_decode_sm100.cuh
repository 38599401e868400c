// Raw units of one key and half to bfloat16 pieces of a tile. Runs on the host for its tests.
//
// A Tile has begin(slice), called before the first piece of a slice, and store(slice, piece, four packed pairs).
#pragma once

#include "cuda/sm100/attention_chunks_sm100.cuh"
#include "kernel_core/cuda/formats.cuh"

namespace mla_fp4::sm100 {

namespace format = kernel_core::cuda;

struct Unit {
  uint32_t x, y, z, w;
};

// A main pass: 256 columns as eight units of codes, and the unit of their 16 scales.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Tile>
KC_HD void decode_main(const Unit (&raw)[8], const Unit& scales, const Tile& tile) {
  const uint32_t scale_words[kSlices] = {scales.x, scales.y, scales.z, scales.w};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int s = 0; s < kSlices; ++s) {
    tile.begin(s);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int k = 0; k < 2; ++k) {
      const Unit& v = raw[2 * s + k];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int w = 0; w < 4; ++w) {  // a word is eight values, two words share a scale
        const uint32_t byte = scale_words[s] >> (8 * (2 * k + w / 2)) & 0xFF;
        uint32_t out[4];
        format::e2m1x8_scaled(words[w], format::e4m3_bf16x2(byte), out);
        tile.store(s, 4 * k + w, out[0], out[1], out[2], out[3]);
      }
    }
  }
}

// Half `part` of a window row's half: 128 columns as eight units, and the word of their four scales.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Tile>
KC_HD void decode_window(const Unit (&raw)[8], uint32_t scales, int part, const Tile& tile) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int u = 0; u < 2; ++u) {
    const int s = 2 * part + u;
    tile.begin(s);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int k = 0; k < 4; ++k) {  // a unit is 16 values, two units share a scale
      const format::Mxfp8Scale scale = format::mxfp8_scale(scales >> (8 * (2 * u + k / 2)) & 0xFF);
      const Unit& v = raw[4 * u + k];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int j = 0; j < 2; ++j) {
        uint32_t low[2], high[2];
        format::e4m3x4_scaled(words[2 * j], scale, low);
        format::e4m3x4_scaled(words[2 * j + 1], scale, high);
        tile.store(s, 2 * k + j, low[0], low[1], high[0], high[1]);
      }
    }
  }
}

// The word of a window row's 16 scale bytes that covers half `half`, part `part`.
KC_HD uint32_t window_scales(const Unit& scales, int half, int part) {
  return half ? (part ? scales.w : scales.z) : (part ? scales.y : scales.x);
}

}  // namespace mla_fp4::sm100
