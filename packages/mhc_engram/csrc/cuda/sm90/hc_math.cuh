// Arithmetic of one token's channels and coefficients, and the product in TF32 with the parts that TF32 drops.
//
// A float32 is its upper 19 bits plus an exact rest. Three products (rest x upper, upper x rest, upper x upper) leave
// out about 2^-21 of a term; sums start afresh for each chunk of channels, so that little is cut off by the unit.
#pragma once

#include "cuda/sm90/hc_plan.cuh"
#include "cuda/sm90/unroll.cuh"
#include "kernel_core/cuda/formats.cuh"

#if defined(__CUDACC__)
#include "kernel_core/cuda/warp.cuh"
#endif

namespace mhc_engram::cuda {

using namespace kernel_core::cuda;

struct Tf32 {
  uint32_t upper, rest;
};

KC_HD Tf32 split_tf32(float x) {
  const uint32_t upper = float_bits(x) & 0xFFFFE000u;
  return {upper, float_bits(add_rn(x, -bits_float(upper)))};
}

// Four channels of all streams: X[j] <- post[j] y + sum_i comb[i][j] X[i]. `given` is post, comb, pre of the token.
__device__ __forceinline__ void update_streams(float (&x)[4][4], const float (&y)[4], const float* given) {
  float post[4], comb[16];
  load_values(given, post);
  load_values(given + 4, comb);
  MHC_ENGRAM_UNROLL
  for (int e = 0; e < 4; ++e) {
    const float old[4] = {x[0][e], x[1][e], x[2][e], x[3][e]};
    MHC_ENGRAM_UNROLL
    for (int j = 0; j < 4; ++j) {
      float sum = mul_rn(post[j], y[e]);
      MHC_ENGRAM_UNROLL
      for (int i = 0; i < 4; ++i) sum = __fmaf_rn(comb[i * 4 + j], old[i], sum);
      x[j][e] = sum;
    }
  }
}

__device__ __forceinline__ void mix_streams(const float (&x)[4][4], const float* given, float (&mix)[4]) {
  float pre[4];
  load_values(given + 20, pre);
  MHC_ENGRAM_UNROLL
  for (int e = 0; e < 4; ++e) {
    mix[e] = mul_rn(pre[0], x[0][e]);
    MHC_ENGRAM_UNROLL
    for (int j = 1; j < 4; ++j) mix[e] = __fmaf_rn(pre[j], x[j][e], mix[e]);
  }
}

KC_HD float inverse_rms(float squares, float count, float eps) {
  return div_rn(1.0f, sqrt_rn(add_rn(div_rn(squares, count), eps)));
}

__device__ __forceinline__ float sigmoid(float x) { return div_rn(1.0f, add_rn(1.0f, expf(-x))); }

// 1 / x within one unit of the last place, without the branch of the exactly rounded one: 156 of them stand in a chain,
// and each step corrects what the one before left.
KC_HD float quick_inverse(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// comb[i][j]: softmax over j, then columns and rows are scaled in turn until both sum to about one.
__device__ __forceinline__ void sinkhorn(float (&c)[4][4], float hc_eps, int iters) {
  MHC_ENGRAM_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float top = fmaxf(fmaxf(c[i][0], c[i][1]), fmaxf(c[i][2], c[i][3]));
    MHC_ENGRAM_UNROLL
    for (int j = 0; j < 4; ++j) c[i][j] = expf(add_rn(c[i][j], -top));
    const float sum = add_rn(add_rn(c[i][0], c[i][1]), add_rn(c[i][2], c[i][3]));
    const float inverse = div_rn(1.0f, sum);
    MHC_ENGRAM_UNROLL
    for (int j = 0; j < 4; ++j) c[i][j] = add_rn(mul_rn(c[i][j], inverse), hc_eps);
  }
  for (int it = 0;; ++it) {
    MHC_ENGRAM_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float sum = add_rn(add_rn(c[0][j], c[1][j]), add_rn(c[2][j], c[3][j]));
      const float inverse = quick_inverse(add_rn(sum, hc_eps));
      MHC_ENGRAM_UNROLL
      for (int i = 0; i < 4; ++i) c[i][j] = mul_rn(c[i][j], inverse);
    }
    if (it + 1 >= iters) break;
    MHC_ENGRAM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float sum = add_rn(add_rn(c[i][0], c[i][1]), add_rn(c[i][2], c[i][3]));
      const float inverse = quick_inverse(add_rn(sum, hc_eps));
      MHC_ENGRAM_UNROLL
      for (int j = 0; j < 4; ++j) c[i][j] = mul_rn(c[i][j], inverse);
    }
  }
}

// What lane r < 24 multiplies and adds to dot product r.
struct HcLogit {
  float scale, base;
};
__device__ __forceinline__ HcLogit load_logit(const HcParams& p, int lane) {
  constexpr int n = HcConfig::streams;
  const int row = lane < HcConfig::coefficients ? lane : 0;
  return {p.scale[row < 2 * n ? row / n : 2], p.base[row]};
}

// One warp, one token. Lane r < 24 brings dot product r, lane 24 the sum of squares. The Sinkhorn part runs alike in
// every lane: a chain of 39 steps is shorter without an exchange in each.
__device__ __forceinline__ void write_coefficients(const HcParams& p, const HcLogit& of, int64_t token, float sum,
                                                   int lane) {
  constexpr int n = HcConfig::streams;
  const float squares = __shfl_sync(kAllLanes, sum, HcConfig::coefficients);
  const float rho = inverse_rms(squares, static_cast<float>(n * p.channels), p.norm_eps);
  const float logit = add_rn(mul_rn(mul_rn(sum, rho), of.scale), of.base);
  const float gate = sigmoid(logit);
  if (lane < n) p.pre_out[token * n + lane] = add_rn(gate, p.hc_eps);
  if (lane >= n && lane < 2 * n) p.post_out[token * n + lane - n] = mul_rn(2.0f, gate);
  float c[4][4];
  MHC_ENGRAM_UNROLL
  for (int i = 0; i < 4; ++i) MHC_ENGRAM_UNROLL
  for (int j = 0; j < 4; ++j) c[i][j] = __shfl_sync(kAllLanes, logit, 2 * n + i * n + j);
  sinkhorn(c, p.hc_eps, p.iters);
  if (lane == 0) {
    MHC_ENGRAM_UNROLL
    for (int i = 0; i < 4; ++i) store_values(p.comb_out + token * 16 + i * 4, c[i]);
  }
}

}  // namespace mhc_engram::cuda
