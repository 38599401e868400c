// The kernels of this package and their arguments. Every pointer is to a contiguous float32 array unless said.
#pragma once

#include <cstdint>

#include "kernel_core/isa.hpp"

namespace mhc_engram {

constexpr int kStreams = 4;                               // n
constexpr int kCoefficients = (2 + kStreams) * kStreams;  // pre, post, comb
constexpr int kChannelMultiple = 16;                      // d is a multiple of the widest register

// One half-layer's stream work; a null pointer leaves a part out.
struct HcStep {
  int64_t tokens = 0, channels = 0;
  float* streams = nullptr;  // X [T, n, d]
  // update, in place: X[j] = post[j] * y + sum_i comb[i][j] * X[i]
  const float* y = nullptr;
  const float* post = nullptr;
  const float* comb = nullptr;
  // coefficients of the updated X
  const float* fn = nullptr;     // [24, n * d]
  const float* base = nullptr;   // [24]
  const float* scale = nullptr;  // [3]
  float norm_eps = 0, hc_eps = 0;
  int iters = 0;
  float* pre_out = nullptr;   // [T, n]
  float* post_out = nullptr;  // [T, n]
  float* comb_out = nullptr;  // [T, n, n]
  // mixing of the updated X: RMSNorm(sum_j pre_mix[j] * X[j]); without norm_weight no norm
  const float* pre_mix = nullptr;
  const float* norm_weight = nullptr;
  float eps = 0;
  float* mixed = nullptr;  // [T, d]
};

struct EngramInject {
  int64_t tokens, channels;
  float* streams;          // X [T, n, d], in place
  const float* kv;         // [T, (n + 1) * d]: a key for each stream, then the value
  const float* qk_weight;  // [n, d]
  const uint8_t* dead;     // [T] or null
  float eps;
  int64_t n;
};

struct EngramRows {
  int64_t requests, tokens, shifts, heads;
  const int64_t* mapped;       // [T]
  const uint8_t* dead;         // [T]
  const int64_t* history;      // [B, shifts - 1], nearest first
  const int32_t* cu_seqlens;   // [B + 1]
  const int64_t* multipliers;  // [shifts]
  const int64_t* primes;       // [(shifts - 1) * heads]
  const int64_t* offsets;      // the same
  int64_t pad_mapped;
  int64_t* rows;  // [T, (shifts - 1) * heads]
};

struct EngramGather {
  int64_t count, dim;    // looked-up rows, values a row
  const uint8_t* table;  // E4M3 [rows, dim]
  const uint8_t* scale;  // UE8M0 [rows, dim / 32]
  const int64_t* rows;   // [count], negative = zeros
  float* out;            // [count, dim]
};

// The argument whose values engram_rows cannot work with, or null.
const char* engram_rows_problem(const EngramRows& a);

void engram_rows(const EngramRows& a);

// The first index whose row is outside [.., table_rows), or -1.
int64_t first_row_outside(const int64_t* rows, int64_t count, int64_t table_rows);

KERNEL_CORE_DECLARE(void, hc_step, (const HcStep&))
KERNEL_CORE_DECLARE(void, engram_inject, (const EngramInject&))
KERNEL_CORE_DECLARE(void, engram_gather, (const EngramGather&))

}  // namespace mhc_engram
