// Which row completes which pair of tokens, and the softmax pooling of one channel of a pair.
#pragma once

#if !defined(__CUDACC__)
#include <cmath>
#endif

#include "kernel_core/cuda/ragged.cuh"

namespace mla_fp4::cuda {

using namespace kernel_core::cuda;

KC_HD bool completes_pair(int64_t position) { return position >= 1 && position % 2 == 1; }

// Pairs of request b, and the number of a pair among them by its odd position
KC_HD int64_t request_pairs(const int32_t* cu_seqlens, const int64_t* start_pos, int64_t b) {
  return pairs_completed(start_pos[b], start_pos[b] + cu_seqlens[b + 1] - cu_seqlens[b]);
}

KC_HD int64_t pair_in_request(int64_t position, int64_t start) { return position / 2 - start / 2; }

// (e0 kv0 + e1 kv1) / (e0 + e1) with e = exp(gate - larger gate): one of the two is exactly 1
KC_HD float pool_pair(float gate0, float gate1, float kv0, float kv1) {
  const float top = gate0 > gate1 ? gate0 : gate1;
  const float e0 = expf(add_rn(gate0, -top)), e1 = expf(add_rn(gate1, -top));
  return div_rn(fmaf(e0, kv0, mul_rn(e1, kv1)), add_rn(e0, e1));
}

}  // namespace mla_fp4::cuda
