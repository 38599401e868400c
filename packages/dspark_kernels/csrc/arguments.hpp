// The arguments of the kernels that work on rows of logits, on any device.
#pragma once

#include <cstdint>

namespace dspark_kernels {

constexpr float kGreedyBelow = 1e-5f;  // a lower temperature means argmax

// Numbers of the draws at one position.
enum Case : int64_t { kTarget = 0, kDraft = 1, kAccept = 2, kResidual = 3 };

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
  const int64_t* rows;          // [count], -1 skips the mask; or null for 0, 1, ...
};

struct ConfidenceHead {
  int64_t requests, drafts, hidden_size, markov_size;
  const float* hidden;  // rows of [B][G], see the strides
  int64_t hidden_request, hidden_draft;
  const float* markov;                    // [B, G, M]
  const float* weight;                    // [H + M]
  const float* temperatures;              // [G] or null
  float *logits, *confidence, *survival;  // [B, G]
};

struct DraftStep {
  int64_t requests, vocab, drafts, step;  // `step` is the column of this draft in the records
  float* logits;                          // [B] rows of V, `row_stride` apart; the bias is added in place
  int64_t row_stride;
  const float* bias;  // [B, V] or null
  const float *temperature, *top_p;
  const int32_t* top_k;  // or null
  const int64_t *seeds, *positions;
  const uint8_t* coupled;  // [B] or null
  int64_t* chosen;         // [B]
  // Records [B, G]
  int64_t* tokens;
  float *logprobs, *top, *factor;
  double* mass;
  int64_t* cut;
};

struct Verify {
  int64_t requests, rows, vocab, drafts;
  const float* logits;  // [N, V]
  const float* draft_logits;
  int64_t draft_request, draft_step;  // strides of draft_logits
  const int64_t* draft_tokens;        // records [S, G], null without drafts
  const float *draft_logprobs, *draft_top, *draft_factor;
  const double* draft_mass;
  const int64_t* draft_cut;
  const int32_t* cu_rows;            // [R + 1]
  const int64_t* positions;          // [N]
  const float *temperature, *top_p;  // top_p may be null on a GPU: 1 everywhere
  const int32_t* top_k;              // or null
  const int64_t* seeds;
  const int32_t* slots;    // [R] or null
  const uint8_t* coupled;  // [R] or null
  int64_t* tokens;         // [R, 1 + G]
  float* logprobs;         // [R, 1 + G]
  int32_t *accepted, *counts;
  uint8_t* failed;
  int64_t* last;
};

}  // namespace dspark_kernels
