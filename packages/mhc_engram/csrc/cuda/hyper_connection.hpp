// Update of the residual streams, coefficients of the next sublayer, mixing and norm on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mhc_engram::cuda {

// All float32 and contiguous, 16-byte aligned where a row is a multiple of 16 bytes. Null leaves a part out: y the
// update, fn the coefficients, pre_mix the mix.
struct HcParams {
  int64_t tokens;
  int64_t channels;          // a multiple of 16
  float* streams;            // [tokens, 4, channels]
  const float* y;            // [tokens, channels]
  const float* post;         // [tokens, 4]
  const float* comb;         // [tokens, 4, 4], source stream first
  const float* fn;           // [24, 4 * channels]
  const float* base;         // [24]
  const float* scale;        // [3]
  float* pre_out;            // may be pre_mix
  float* post_out;           // may be post
  float* comb_out;           // may be comb
  const float* pre_mix;      // [tokens, 4]
  const float* norm_weight;  // [channels], or null: no norm
  float* mixed;              // [tokens, channels], or null
  uint8_t* codes;            // E4M3 [tokens, channels] of the mix, or null
  uint8_t* code_scales;      // UE8M0 [tokens, channels / 32], with codes
  float norm_eps, hc_eps, eps;
  int iters;
};

// How a launch is cut: `cluster` CTAs share the channels of `tile` tokens. No bit of a result depends on it.
struct HcShape {
  int cluster;    // 1, 2, 4, 8 or 16
  int tile;       // 1 to 16
  int warps = 8;  // of a CTA: 4 (two CTAs share a multiprocessor where shared memory allows) or 8
  // 0: a cluster takes one tile. 1: as many clusters as run at once take tiles in turn, and copies of the next tile run
  // ahead; 4 CTAs or more, at 5120 channels and 8 CTAs up to 48 tokens of a tile. 2: the same, and fn stays in shared
  // memory; 16 CTAs, 5120 channels, up to 32 tokens. Both are for 8 warps, to which four are added; a call that leaves
  // out fn or the mix runs as with 0.
  int stay = 0;
};

HcShape hc_shape(int64_t tokens, int64_t channels, int64_t multiprocessors);

cudaError_t hc_step(const HcParams& params, const HcShape& shape, cudaStream_t stream);

}  // namespace mhc_engram::cuda
