// The hash of one token's n-gram, and the gate. The rules are those of mhc_engram.engram_rows and engram_inject.
#pragma once

#include "cuda/engram.hpp"
#include "kernel_core/cuda/hd.cuh"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace mhc_engram::cuda {

using namespace kernel_core::cuda;

// The request of a token: the first whose end lies behind it; `requests` where there is none.
KC_HD int64_t request_of(const int32_t* cu_seqlens, int64_t requests, int64_t token) {
  int64_t low = 0, high = requests;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle + 1] <= token)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Table row of column `column` (order-major) of a token; -1 for a dead one and for one of no request.
KC_HD int64_t engram_row(const EngramRowsParams& a, int64_t token, int64_t column) {
  const int64_t request = request_of(a.cu_seqlens, a.requests, token);
  if (a.dead[token] || request == a.requests) return -1;
  const int64_t local = token - a.cu_seqlens[request];
  // Unsigned: products wrap.
  uint64_t rolling = static_cast<uint64_t>(a.mapped[token]) * static_cast<uint64_t>(a.multipliers[0]);
  bool blocked = false;
  const int64_t order = column / a.heads;
  for (int64_t s = 1; s <= order + 1; ++s) {
    int64_t seen = -1;
    if (local < s)
      seen = a.history[request * a.orders + s - 1 - local];
    else if (!a.dead[token - s])
      seen = a.mapped[token - s];
    blocked = blocked || seen < 0;
    rolling ^= static_cast<uint64_t>(blocked ? a.pad_mapped : seen) * static_cast<uint64_t>(a.multipliers[s]);
  }
  const int64_t prime = a.primes[column];
  const int64_t rest = static_cast<int64_t>(rolling) % prime;
  return (rest < 0 ? rest + prime : rest) + a.offsets[column];
}

// sigmoid(sign(dot) sqrt(max(|dot|, 1e-6))) of the scaled dot product; NaN stays.
KC_HD float engram_gate(float sum, float x_squares, float key_squares, int64_t channels, float eps) {
  const float d = static_cast<float>(channels);
  const auto inverse_rms = [&](float squares) { return div_rn(1.0f, sqrt_rn(add_rn(div_rn(squares, d), eps))); };
  const float dot =
      mul_rn(mul_rn(mul_rn(sum, inverse_rms(x_squares)), inverse_rms(key_squares)), div_rn(1.0f, sqrt_rn(d)));
  const float magnitude = dot < 0 ? -dot : dot;
  const float root = sqrt_rn(magnitude < 1e-6f ? 1e-6f : magnitude);
  const float signed_root = dot > 0 ? root : dot < 0 ? -root : dot == 0 ? 0.0f : dot;
  return div_rn(1.0f, add_rn(1.0f, expf(-signed_root)));
}

}  // namespace mhc_engram::cuda
