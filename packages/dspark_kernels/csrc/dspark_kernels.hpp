// The kernels of this package and their arguments.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace dspark_kernels {

constexpr float kGreedyBelow = 1e-5f;  // a lower temperature means argmax

struct Sample {
  int64_t tokens, vocab;
  const float* logits;       // [T, V]
  const float* temperature;  // [T], >= 0
  const float* top_p;        // [T], in (0, 1]
  const int32_t* top_k;      // [T], 0 = off; or null
  const int64_t* seeds;      // [T]
  const int64_t* positions;  // [T]
  int64_t draw;              // which of the draws at a position
  int64_t* chosen;           // [T]
  float* logprobs;           // [T]
};

struct TopLogprobs {
  int64_t tokens, vocab, k;
  const float* logits;  // [T, V]
  int64_t* ids;         // [T, k]
  float* logprobs;      // [T, k]
};

struct TokenMask {
  int64_t count, vocab, words;  // masked rows, vocabulary, words of a mask
  float* logits;                // [T, V]
  const int32_t* bitmask;       // [count, words], a set bit allows
  const int64_t* rows;          // [count] or null for 0, 1, ...
};

KERNEL_CORE_DECLARE(void, sample, (const Sample&))
KERNEL_CORE_DECLARE(void, top_logprobs, (const TopLogprobs&))
KERNEL_CORE_DECLARE(void, token_mask, (const TokenMask&))

}  // namespace dspark_kernels
