// The confidence head: a warp for each draft, a block for each request.
#pragma once

#include "arguments.hpp"
#include "cuda/sm90/row_blocks.cuh"
#include "survival.hpp"

namespace dspark_kernels::cuda {

constexpr int kMostHeads = 8;
constexpr float kConfidenceLimit = 60.0f;  // the sigmoid is at its end long before

// Lanes take neighbours of four where all rows start at multiples of 16 bytes; the order depends on that alone.
__device__ __forceinline__ float lane_dot(const float* a, const float* b, int64_t n, int lane, bool vectors) {
  float sum = 0;
  if (vectors) {
    for (int64_t i = 4 * lane; i < n; i += 128) {
      const float4 x = *reinterpret_cast<const float4*>(a + i), y = *reinterpret_cast<const float4*>(b + i);
      sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
  } else {
    for (int64_t i = lane; i < n; i += 32) sum += a[i] * b[i];
  }
  return sum;
}

__device__ __forceinline__ void confidence_request(const ConfidenceHead& a, int64_t b, bool vectors,
                                                   float (&shared)[kMostHeads]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t k = threadIdx.x / 32, at = b * a.drafts + k;
  const float* hidden = a.hidden + b * a.hidden_request + k * a.hidden_draft;
  float logit = lane_dot(hidden, a.weight, a.hidden_size, lane, vectors);
  logit += lane_dot(a.markov + at * a.markov_size, a.weight + a.hidden_size, a.markov_size, lane, vectors);
  logit = warp_add(logit);
  if (lane == 0) {
    const float scaled = a.temperatures ? logit / a.temperatures[k] : logit;
    const float bounded = fminf(fmaxf(scaled, -kConfidenceLimit), kConfidenceLimit);
    const float confidence = scaled != scaled ? 0.0f : 1.0f / (1.0f + expf(-bounded));
    a.logits[at] = logit;
    a.confidence[at] = shared[k] = confidence;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float running = 1.0f;
  for (int64_t j = 0; j < a.drafts; ++j) a.survival[b * a.drafts + j] = running = survive(running, shared[j]);
}

}  // namespace dspark_kernels::cuda
