// The softmax of one row and head over a score buffer, with a sink in the denominator only.
#pragma once

#include "kernel_core/simd.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

inline constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Turns n scores into weights e^(s - max) and returns the factor that makes them a softmax. n is a multiple of the
// vector width; places without a key hold kMasked and get weight 0. The maximum is over the keys and the sink, so a
// sink far above them cannot overflow. `keys` is how many places hold a key: 0 gives factor 0, so the output is zeros.
inline float softmax_weights(float* s, int64_t n, int64_t keys, float sink) {
  if (keys == 0) {
    for (int64_t i = 0; i < n; ++i) s[i] = 0.0f;
    return 0.0f;
  }
  F32 top = F32::set(kMasked);
  for (int64_t i = 0; i < n; i += F32::width) top = max(top, F32::load(s + i));
  const float keys_max = reduce_max(top);
  const float m = sink > keys_max ? sink : keys_max;
  if (m == std::numeric_limits<float>::infinity() && sink == m && keys_max < m) {  // an infinite sink takes all
    for (int64_t i = 0; i < n; ++i) s[i] = 0.0f;
    return 0.0f;
  }
  const F32 shift = F32::set(m);
  F32 sum = F32::zero();
  for (int64_t i = 0; i < n; i += F32::width) {
    const F32 p = exp(F32::load(s + i) - shift);
    p.store(s + i);
    sum = sum + p;
  }
  alignas(64) float tail[F32::width];
  exp(F32::set(sink) - shift).store(tail);
  return 1.0f / (reduce_add(sum) + tail[0]);
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
