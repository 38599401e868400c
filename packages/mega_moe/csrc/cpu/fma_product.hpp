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

template <int R, int T>
inline void dot_block(const float* const* w, const float* x, int64_t ldx, int64_t k, float* out, int64_t ldo) {
  using kc::F32;
  F32 acc[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) acc[r][t] = F32::zero();
  int64_t i = 0;
  for (; i + F32::width <= k; i += F32::width) {
    F32 wv[R];
    for (int r = 0; r < R; ++r) wv[r] = F32::load(w[r] + i);
    for (int t = 0; t < T; ++t) {
      const F32 xv = F32::load(x + t * ldx + i);
      for (int r = 0; r < R; ++r) acc[r][t] = fma(wv[r], xv, acc[r][t]);
    }
  }
  if (i < k) {
    const int n = static_cast<int>(k - i);
    for (int t = 0; t < T; ++t) {
      const F32 xv = F32::load_n(x + t * ldx + i, n);
      for (int r = 0; r < R; ++r) acc[r][t] = fma(F32::load_n(w[r] + i, n), xv, acc[r][t]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) out[t * ldo + r] = reduce_add(acc[r][t]);
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
    static thread_local Scratch scratch;
    float* buffer = w.format == Format::f32
                        ? nullptr
                        : scratch.get<float>(2 * kRowBlock * w.k * static_cast<int64_t>(sizeof(float)));
    for (int64_t r = 0; r < rows; r += 2 * kRowBlock) {
      const float* row[2 * kRowBlock];
      const int64_t n = std::min<int64_t>(2 * kRowBlock, rows - r);
      for (int64_t i = 0; i < n; ++i) row[i] = row_to_float(w, row0 + r + i, buffer ? buffer + i * w.k : nullptr);
      int64_t t = 0;
      for (; t + kTokenBlock <= tokens; t += kTokenBlock)
        rows_of<kTokenBlock>(row, n, x + t * ldx, ldx, w.k, out + t * ldo + r, ldo);
      for (; t < tokens; ++t) rows_of<1>(row, n, x + t * ldx, ldx, w.k, out + t * ldo + r, ldo);
    }
  }

 private:
  template <int T>
  static void rows_of(const float* const* row, int64_t n, const float* x, int64_t ldx, int64_t k, float* out,
                      int64_t ldo) {
    int64_t r = 0;
    if constexpr (T == 1) {
      for (; r + 2 * kRowBlock <= n; r += 2 * kRowBlock) dot_block<2 * kRowBlock, T>(row + r, x, ldx, k, out + r, ldo);
    }
    for (; r + kRowBlock <= n; r += kRowBlock) dot_block<kRowBlock, T>(row + r, x, ldx, k, out + r, ldo);
    for (; r < n; ++r) dot_block<1, T>(row + r, x, ldx, k, out + r, ldo);
  }
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
