// From 24 dot products to the coefficients of a token, for one token in each lane.
//
// A lane's operations never look at another lane, so a token's bits do not depend on its neighbours.
#pragma once

#include "kernel_core/simd.hpp"
#include "mhc_engram.hpp"

namespace mhc_engram {
namespace KERNEL_CORE_ISA {

using namespace kernel_core::KERNEL_CORE_ISA;

struct Coefficients {
  F32 pre[kStreams], post[kStreams], comb[kStreams][kStreams];
};

// comb[i][j]: i is the source stream, j the destination. Rows get a softmax, then columns and rows are scaled in
// turn until both sum to about one.
inline void sinkhorn(F32 (&c)[kStreams][kStreams], float hc_eps, int iters) {
  const F32 one = F32::set(1.0f), eps = F32::set(hc_eps);
  for (auto& row : c) {
    const F32 top = max(max(row[0], row[1]), max(row[2], row[3]));
    for (auto& v : row) v = exp(v - top);
    const F32 inverse = one / ((row[0] + row[1]) + (row[2] + row[3]));
    for (auto& v : row) v = fma(v, inverse, eps);
  }
  for (int it = 0;; ++it) {
    for (int j = 0; j < kStreams; ++j) {
      const F32 inverse = one / (((c[0][j] + c[1][j]) + (c[2][j] + c[3][j])) + eps);
      for (int i = 0; i < kStreams; ++i) c[i][j] = c[i][j] * inverse;
    }
    if (it + 1 >= iters) break;
    for (auto& row : c) {
      const F32 inverse = one / (((row[0] + row[1]) + (row[2] + row[3])) + eps);
      for (auto& v : row) v = v * inverse;
    }
  }
}

// dots[r] = fn[r] . u, squares = u . u over n * d values
inline Coefficients coefficients(const F32* dots, F32 squares, const HcStep& a) {
  const F32 mean = squares / F32::set(static_cast<float>(kStreams * a.channels));
  const F32 rho = F32::set(1.0f) / sqrt(mean + F32::set(a.norm_eps));
  const auto logit = [&](int r, int group) {
    return fma(dots[r] * rho, F32::set(a.scale[group]), F32::set(a.base[r]));
  };
  Coefficients out;
  for (int j = 0; j < kStreams; ++j) {
    out.pre[j] = sigmoid(logit(j, 0)) + F32::set(a.hc_eps);
    out.post[j] = F32::set(2.0f) * sigmoid(logit(kStreams + j, 1));
    for (int k = 0; k < kStreams; ++k) out.comb[j][k] = logit((2 + j) * kStreams + k, 2);
  }
  sinkhorn(out.comb, a.hc_eps, a.iters);
  return out;
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mhc_engram
