#include <cmath>
#include <limits>

#include "kernel_core/parallel.hpp"
#include "kernel_core/simd.hpp"
#include "kernels.hpp"
#include "scratch.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

namespace kc = kernel_core::KERNEL_CORE_ISA;

// sqrt(log(1 + e^x)) without overflow for large x and without underflow for very negative x.
//
// With z = e^-|x| and log(1 + z) = z q(z):  x >= 0: sqrt(x + z q);  x < 0: e^(x/2) sqrt(q).
// q comes from log(1 + z) = 2 atanh(s), s = z / (2 + z) <= 1/3.
inline kc::F32 sqrt_softplus(kc::F32 x) {
  using kc::F32;
  const F32 magnitude = abs(x), one = F32::set(1.0f);
  const F32 z = exp(F32::zero() - magnitude);
  const F32 r = one / (z + F32::set(2.0f)), s = z * r, s2 = s * s;
  F32 p = F32::set(1.0f / 17);
  p = fma(p, s2, F32::set(1.0f / 15));
  p = fma(p, s2, F32::set(1.0f / 13));
  p = fma(p, s2, F32::set(1.0f / 11));
  p = fma(p, s2, F32::set(1.0f / 9));
  p = fma(p, s2, F32::set(1.0f / 7));
  p = fma(p, s2, F32::set(1.0f / 5));
  p = fma(p, s2, F32::set(1.0f / 3));
  p = fma(p, s2, one);
  const F32 q = (r + r) * p;
  const F32 positive = sqrt(fma(z, q, magnitude));
  const F32 negative = exp(magnitude * F32::set(-0.5f)) * sqrt(q);
  const F32 smallest = F32::set(std::numeric_limits<float>::denorm_min());
  return zero_below(x, F32::zero(), positive) + zero_below(F32::zero() - x, smallest, negative);
}

// The best k of the biased scores in descending order; a tie goes to the lower id. A NaN ranks as -inf.
inline void select(const float* biased, int64_t experts, int64_t k, int32_t* ids, float* best) {
  int64_t filled = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const float b = biased[e];
    if (filled == k && !(b > best[k - 1])) continue;
    int64_t at = filled < k ? filled++ : k - 1;
    for (; at > 0 && b > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = b;
    ids[at] = static_cast<int32_t>(e);
  }
}

void route(const RouteArgs& a) {
  kernel_core::parallel_for(a.tokens, a.experts * 8, [&](int64_t t) {
    using kc::F32;
    static thread_local Scratch scratch;
    float* score = scratch.get<float>((2 * a.experts + a.top_k) * 4);
    float* biased = score + a.experts;
    const float* x = a.logits + t * a.experts;
    const float* bias = a.bias_vl && a.is_image[t] ? a.bias_vl : a.bias;
    const F32 lowest = F32::set(-std::numeric_limits<float>::infinity());
    for (int64_t e = 0; e < a.experts; e += F32::width) {
      const int m = static_cast<int>(std::min<int64_t>(a.experts - e, F32::width));
      const F32 s = sqrt_softplus(F32::load_n(x + e, m));
      s.store_n(score + e, m);
      max(s + F32::load_n(bias + e, m), lowest).store_n(biased + e, m);  // max gives -inf where the sum is NaN
    }
    int32_t* ids = a.ids + t * a.top_k;
    float* weights = a.weights + t * a.top_k;
    select(biased, a.experts, a.top_k, ids, biased + a.experts);
    float sum = 0.0f;
    for (int64_t i = 0; i < a.top_k; ++i) sum += score[ids[i]];
    for (int64_t i = 0; i < a.top_k; ++i) weights[i] = score[ids[i]] / (sum + 1e-20f) * a.scale;
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
