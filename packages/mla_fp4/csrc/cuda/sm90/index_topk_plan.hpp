// How scores and selections share a workspace: plain arithmetic, for the launches and for their tests.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mla_fp4::index_topk_plan {

inline constexpr int64_t kFewRows = 256;         // as many fill the device: before fewer at a time, shorter pieces
inline constexpr int64_t kShortestPiece = 4096;  // positions
inline constexpr int64_t kPieceUnit = 256;

// `rows` at a time, each in pieces of `positions`; whole rows where that is the width. 0 rows: does not fit.
struct Parts {
  int64_t rows, positions, stride;
};

constexpr int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// `floats` for scores.
constexpr Parts parts(int64_t rows, int64_t width, int64_t k, int64_t floats) {
  const int64_t whole = rounded(width, 4);
  const int64_t fit = floats / std::max<int64_t>(whole, 1);
  if (fit >= std::min(rows, kFewRows)) return {std::min(fit, rows), width, whole};
  const int64_t shortest = rounded(std::max(kShortestPiece, k), kPieceUnit);
  const int64_t group = std::min({rows, kFewRows, floats / (k + shortest)});
  if (k % 4 != 0 || group < 1) return {fit, width, whole};
  const int64_t positions = (floats / group - k) / kPieceUnit * kPieceUnit;
  return {group, std::min(positions, width), k + rounded(std::min(positions, width), 4)};
}

}  // namespace mla_fp4::index_topk_plan
