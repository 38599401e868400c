// The two products of attention, cut into blocks that stay in registers.
//
// One score is one chain of multiply-adds over the head's values; one output value is one chain over the keys in
// order. Neither depends on which heads or keys share its block, so blocks may be cut as the shape suggests.
#pragma once

#include "kernel_core/simd.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

inline constexpr int kHeadBlock = 4;
#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)
inline constexpr int kKeyBlock = 4;
#else
inline constexpr int kKeyBlock = 2;  // 16 registers: 8 sums, 2 keys, a query
#endif

#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)

// Lane i of the result is the sum of the lanes of v[i]: a transpose folded into the additions.
inline __m512 sum_lanes_of_16(const __m512* v) {
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const __m512* w = v + 4 * i;
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
    const __m512d ad = _mm512_castps_pd(a), bd = _mm512_castps_pd(b);
    quads[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ad, bd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ad, bd)));
  }
  const __m512 a =
      _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44), _mm512_shuffle_f32x4(quads[0], quads[1], 0xEE));
  const __m512 b =
      _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44), _mm512_shuffle_f32x4(quads[2], quads[3], 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

#endif

// scores[h][k] = scale * q[h] . keys[k] for kHeadBlock heads and kKeyBlock keys. A short block repeats its last head
// or key and leaves `heads` lower.
inline void score_block(const float* const* q, const float* const* keys, int64_t dim, float scale, int64_t heads,
                        float* scores, int64_t stride) {
  F32 sum[kHeadBlock * kKeyBlock];
  for (F32& s : sum) s = F32::zero();
  for (int64_t d = 0; d < dim; d += F32::width) {
    F32 k[kKeyBlock];
    for (int j = 0; j < kKeyBlock; ++j) k[j] = F32::load(keys[j] + d);
    for (int h = 0; h < kHeadBlock; ++h) {
      const F32 v = F32::load(q[h] + d);
      for (int j = 0; j < kKeyBlock; ++j) sum[h * kKeyBlock + j] = fma(v, k[j], sum[h * kKeyBlock + j]);
    }
  }
#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)
  __m512 v[16];
  for (int i = 0; i < 16; ++i) v[i] = sum[i].v;
  alignas(64) float sums[16];
  _mm512_store_ps(sums, _mm512_mul_ps(sum_lanes_of_16(v), _mm512_set1_ps(scale)));
#else
  float sums[kHeadBlock * kKeyBlock];
  for (int i = 0; i < kHeadBlock * kKeyBlock; ++i) sums[i] = reduce_add(sum[i]) * scale;
#endif
  for (int64_t h = 0; h < heads; ++h) std::memcpy(scores + h * stride, sums + h * kKeyBlock, kKeyBlock * sizeof(float));
}

// out[h][d] = factor[h] * sum over keys of weights[h][key] * keys[key][d], for H heads and V vectors of d
template <int H, int V>
inline void value_block(const float* weights, int64_t stride, const float* const* keys, int64_t n, const float* factor,
                        float* out, int64_t dim, int64_t d) {
  constexpr int w = F32::width;
  F32 sum[H][V];
  for (auto& row : sum)
    for (F32& s : row) s = F32::zero();
  for (int64_t i = 0; i < n; ++i) {
    F32 v[V];
    for (int j = 0; j < V; ++j) v[j] = F32::load(keys[i] + d + j * w);
    for (int h = 0; h < H; ++h) {
      const F32 p = F32::set(weights[h * stride + i]);
      for (int j = 0; j < V; ++j) sum[h][j] = fma(p, v[j], sum[h][j]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int j = 0; j < V; ++j) (sum[h][j] * F32::set(factor[h])).store(out + h * dim + d + j * w);
}

template <int H, int V>
inline void value_heads(const float* weights, int64_t stride, const float* const* keys, int64_t n, const float* factor,
                        float* out, int64_t dim) {
  constexpr int64_t step = V * F32::width;
  for (int64_t d = 0; d < dim; d += step) value_block<H, V>(weights, stride, keys, n, factor, out, dim, d);
}

// All heads: in eights where registers allow, then in fours, then alone. dim is a multiple of 32.
inline void values(const float* weights, int64_t stride, const float* const* keys, int64_t n, const float* factor,
                   float* out, int64_t heads, int64_t dim) {
  int64_t h = 0;
#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)
  for (; h + 8 <= heads; h += 8)
    value_heads<8, 2>(weights + h * stride, stride, keys, n, factor + h, out + h * dim, dim);
  for (; dim % 64 == 0 && h + 4 <= heads; h += 4)
    value_heads<4, 4>(weights + h * stride, stride, keys, n, factor + h, out + h * dim, dim);
#endif
  for (; h + 4 <= heads; h += 4)
    value_heads<4, 2>(weights + h * stride, stride, keys, n, factor + h, out + h * dim, dim);
  for (; h < heads; ++h) value_heads<1, 2>(weights + h * stride, stride, keys, n, factor + h, out + h * dim, dim);
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
