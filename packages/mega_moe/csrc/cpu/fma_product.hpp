// Products of packed weights and float32 activations with plain fused multiply-adds.
//
// One output is one chain: lanes over k in ascending order, then the fixed fold of reduce_add. Blocks only share
// loads between chains, so an output does not depend on how many tokens or rows are computed with it.
#pragma once

#include <algorithm>

#include "rows_to_float.hpp"
#include "scratch.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

// out[r] = reduce_add(acc[r]), the same sums in the same order, four at a time where registers are wide
template <int R>
inline void fold(const kc::F32* acc, float* out) {
  int r = 0;
#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)
  const auto halves = [](__m512 a, __m512 b) {  // lanes i and i + 8 of both
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  };
  for (; r + 4 <= R; r += 4) {
    const __m512 ab = halves(acc[r].v, acc[r + 1].v), cd = halves(acc[r + 2].v, acc[r + 3].v);
    __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    q = _mm512_add_ps(q, _mm512_permute_ps(q, 0x4E));
    q = _mm512_add_ps(q, _mm512_permute_ps(q, 0xB1));
    _mm512_mask_compressstoreu_ps(out + r, 0x1111, q);
  }
#endif
  for (; r < R; ++r) out[r] = reduce_add(acc[r]);
}

// Chains of R rows and T tokens over [0, k). Where `carry` is given, it holds the lanes of a chain from one stretch
// of k to the next: [T][carry_rows] registers.
template <int R, int T>
inline void dot_block(const float* const* w, const float* x, int64_t ldx, int64_t k, bool first, bool last,
                      float* carry, int64_t carry_rows, float* out, int64_t ldo) {
  using kc::F32;
  F32 acc[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) acc[t][r] = first ? F32::zero() : F32::load(carry + (t * carry_rows + r) * F32::width);
  int64_t i = 0;
  for (; i + F32::width <= k; i += F32::width) {
    F32 wv[R];
    for (int r = 0; r < R; ++r) wv[r] = F32::load(w[r] + i);
    for (int t = 0; t < T; ++t) {
      const F32 xv = F32::load(x + t * ldx + i);
      for (int r = 0; r < R; ++r) acc[t][r] = fma(wv[r], xv, acc[t][r]);
    }
  }
  if (i < k) {
    const int n = static_cast<int>(k - i);
    for (int t = 0; t < T; ++t) {
      const F32 xv = F32::load_n(x + t * ldx + i, n);
      for (int r = 0; r < R; ++r) acc[t][r] = fma(F32::load_n(w[r] + i, n), xv, acc[t][r]);
    }
  }
  for (int t = 0; t < T; ++t) {
    if (last)
      fold<R>(acc[t], out + t * ldo);
    else
      for (int r = 0; r < R; ++r) acc[t][r].store(carry + (t * carry_rows + r) * F32::width);
  }
}

#if defined(KERNEL_CORE_ISA_avx512) || defined(KERNEL_CORE_ISA_amx)
inline constexpr int kTokenBlock = 4;
#else
inline constexpr int kTokenBlock = 2;
#endif
inline constexpr int kRowBlock = 4;

// Activations as this level wants them: rows of k floats.
class FmaProduct {
 public:
  static constexpr int64_t kPanel = 32;  // rows of a work item
  static int64_t panel_rows(int64_t, int64_t) { return kPanel; }

  static int64_t packed_bytes(int64_t tokens, int64_t k) { return tokens * k * static_cast<int64_t>(sizeof(float)); }

  static int64_t cycles(int64_t rows, int64_t tokens, int64_t k) {
    return rows * k * (2 + tokens) / (kc::F32::width * 3 / 2 + 1);
  }

  // Gathers rows of x; `rows` null means 0, 1, 2, ...
  static void pack(const float* x, int64_t ldx, const int32_t* rows, int64_t tokens, int64_t k, Format, char* out) {
    float* o = reinterpret_cast<float*>(out);
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(x + (rows ? rows[t] : t) * ldx, k, o + t * k);
  }
  // Columns [column, column + n) of every packed row.
  static void pack_columns(const float* values, int64_t ld, int64_t tokens, int64_t k, int64_t column, int64_t n,
                           Format, char* out) {
    float* o = reinterpret_cast<float*>(out);
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(values + t * ld, n, o + t * k + column);
  }

  static void run(const Matrix& w, int64_t row0, int64_t rows, const char* packed, int64_t tokens, float* out,
                  int64_t ldo) {
    run_rows(w, row0, rows, reinterpret_cast<const float*>(packed), w.k, tokens, out, ldo);
  }

  // out[t * ldo + r] = w[row0 + r] . x[t]
  static void run_rows(const Matrix& w, int64_t row0, int64_t rows, const float* x, int64_t ldx, int64_t tokens,
                       float* out, int64_t ldo) {
    static thread_local Scratch scratch, carried;
    const int64_t pitch = (w.k + 15) / 16 * 16 + 16;  // rows a line apart, or all would compete for one cache set
    float* buffer =
        w.format == Format::f32 ? nullptr : scratch.get<float>(kRows * pitch * static_cast<int64_t>(sizeof(float)));
    // With many tokens, a chunk of them stays in L2 for all rows, a stretch of k of the rows in L1 for the chunk, and
    // the chains of the chunk are carried from stretch to stretch.
    const bool whole = w.k <= kStretch || tokens <= kFewTokens;
    const int64_t chunk = whole ? tokens : kChunk;
    float* carry =
        whole ? nullptr : carried.get<float>(kRows * kChunk * kc::F32::width * static_cast<int64_t>(sizeof(float)));
    for (int64_t t = 0; t < tokens; t += chunk) {
      const int64_t m = std::min(chunk, tokens - t);
      for (int64_t r = 0; r < rows; r += kRows) {
        const float* row[kRows];
        const int64_t n = std::min(kRows, rows - r);
        for (int64_t i = 0; i < n; ++i) row[i] = row_to_float(w, row0 + r + i, buffer ? buffer + i * pitch : nullptr);
        const int64_t step = whole ? w.k : kStretch;
        for (int64_t k = 0; k < w.k; k += step) {
          const float* at[kRows];
          for (int64_t i = 0; i < n; ++i) at[i] = row[i] + k;
          stretch(at, n, x + t * ldx + k, ldx, m, std::min(step, w.k - k), k == 0, k + step >= w.k, carry,
                  out + t * ldo + r, ldo);
        }
      }
    }
  }

 private:
  static constexpr int64_t kRows = 2 * kRowBlock;  // decoded together
  static constexpr int64_t kStretch = 1024, kChunk = 64, kFewTokens = 8;

  static void stretch(const float* const* row, int64_t n, const float* x, int64_t ldx, int64_t tokens, int64_t k,
                      bool first, bool last, float* carry, float* out, int64_t ldo) {
    int64_t t = 0;
    const auto place = [&](int64_t i) { return carry ? carry + i * kRows * kc::F32::width : nullptr; };
    for (; t + kTokenBlock <= tokens; t += kTokenBlock)
      rows_of<kTokenBlock>(row, n, x + t * ldx, ldx, k, first, last, place(t), out + t * ldo, ldo);
    for (; t < tokens; ++t) rows_of<1>(row, n, x + t * ldx, ldx, k, first, last, place(t), out + t * ldo, ldo);
  }

  template <int T>
  static void rows_of(const float* const* row, int64_t n, const float* x, int64_t ldx, int64_t k, bool first, bool last,
                      float* carry, float* out, int64_t ldo) {
    int64_t r = 0;
    const auto place = [&](int64_t i) { return carry ? carry + i * kc::F32::width : nullptr; };
    if constexpr (T == 1) {
      for (; r + kRows <= n; r += kRows)
        dot_block<kRows, T>(row + r, x, ldx, k, first, last, place(r), kRows, out + r, ldo);
    }
    for (; r + kRowBlock <= n; r += kRowBlock)
      dot_block<kRowBlock, T>(row + r, x, ldx, k, first, last, place(r), kRows, out + r, ldo);
    for (; r < n; ++r) dot_block<1, T>(row + r, x, ldx, k, first, last, place(r), kRows, out + r, ldo);
  }
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
