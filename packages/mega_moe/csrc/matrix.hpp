// Shapes and pointers that the Python side hands over. Plain data, shared by all instruction sets.
#pragma once

#include <cstdint>

namespace mega_moe {

enum class Format : int { mxfp4 = 0, fp8 = 1, bf16 = 2, f32 = 3 };

// A weight matrix [rows, k], row-major, as the checkpoint stores it.
//   mxfp4: k/2 bytes a row, even element in the low nibble; one UE8M0 scale for each (row, 32 columns)
//   fp8:   k E4M3 bytes a row; one UE8M0 scale for each 32 x 32 block
//   bf16, f32: no scales
struct Matrix {
  const void* data;
  const uint8_t* scale;
  int64_t rows;
  int64_t k;
  Format format;
};

// y[t, g*out + o] = sum_i x[t, g*k + i] * w[g*out + o, i]
struct LinearArgs {
  const float* x;
  Matrix w;  // rows = groups * out
  float* y;
  int64_t tokens;
  int64_t out;
  int64_t groups;
};

struct ExpertsArgs {
  const float* x;        // [tokens, d]
  const int32_t* ids;    // [tokens, top_k], -1 = no expert
  const float* weights;  // [tokens, top_k]
  float* y;              // [tokens, d]
  int64_t tokens, top_k, d, inter, experts;
  const uint8_t *w13, *s13, *w2, *s2;                              // MXFP4
  int64_t shared_inter;                                            // 0 = no shared expert
  const uint8_t *shared_w13, *shared_s13, *shared_w2, *shared_s2;  // FP8
  float limit;
};

struct RouteArgs {
  const float* logits;      // [tokens, experts]
  const float* bias;        // [experts]
  const float* bias_vl;     // [experts] or null
  const uint8_t* is_image;  // [tokens] or null
  int32_t* ids;             // [tokens, top_k]
  float* weights;           // [tokens, top_k]
  int64_t tokens, experts, top_k;
  float scale;
};

}  // namespace mega_moe
