// Scoring and selection in turn, in a workspace that may be smaller than all scores. Host code alone; the device says
// which scoring it is.
#include "cuda/index_topk.hpp"

#include "cuda/dispatch.hpp"
#include "cuda/sm90/index_topk_plan.hpp"
#include "cuda/topk.hpp"

namespace mla_fp4::cuda {
namespace {

struct Layout {
  int64_t slices, topk_at, scores_at;  // bytes
};

Layout layout(int64_t rows, int64_t heads, int64_t width, int64_t k, int64_t multiprocessors) {
  Layout l;
  l.slices = topk_slices(rows, width, k, multiprocessors);
  l.topk_at = index_topk_plan::rounded(index_workspace_on_device(rows, heads), 256);
  l.scores_at = l.topk_at + index_topk_plan::rounded(topk_workspace(rows, k, l.slices), 256);
  return l;
}

cudaError_t multiprocessors_of_device(int* count) {
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace

int64_t index_topk_workspace(int64_t rows, int64_t heads, int64_t width, int64_t k, int64_t scores) {
  int multiprocessors = 0;
  if (multiprocessors_of_device(&multiprocessors) != cudaSuccess) multiprocessors = 1;
  const int64_t all = rows * index_topk_plan::rounded(width, 4) * static_cast<int64_t>(sizeof(float));
  return layout(rows, heads, width, k, multiprocessors).scores_at + std::min(all, scores);
}

cudaError_t index_topk(IndexTopkParams const& p, cudaStream_t stream) {
  IndexScoreParams score = p.score;
  if (score.rows == 0) return cudaSuccess;
  if (!p.workspace || !p.out || p.k < 1 || score.rows < 0) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  if (cudaError_t e = multiprocessors_of_device(&multiprocessors)) return e;
  const Layout l = layout(score.rows, score.heads, score.width, p.k, multiprocessors);
  const int64_t floats = (p.workspace_bytes - l.scores_at) / static_cast<int64_t>(sizeof(float));
  const auto parts = index_topk_plan::parts(score.rows, score.width, score.candidates ? 1 : p.k, floats);
  if (floats < 0 || parts.rows < 1 || (score.candidates && parts.positions < score.width)) return cudaErrorInvalidValue;
  auto* const memory = static_cast<uint8_t*>(p.workspace);
  score.workspace = memory;
  score.scores = reinterpret_cast<float*>(memory + l.scores_at);
  score.stride = parts.stride;
  score.maxima = nullptr;
  score.fill_hidden = false;
  score.packed = false;
  const bool pieces = parts.positions < score.width;
  for (int64_t first = 0; first < score.rows; first += parts.rows) {
    score.first_row = first;
    score.end_row = std::min(first + parts.rows, score.rows);
    TopkParams best{};
    best.scores = score.scores, best.stride = parts.stride;
    best.lengths = score.visible + first;
    best.rows = score.end_row - first;
    best.k = p.k, best.out = p.out + first * p.k;
    best.slices = 1;
    if (score.candidates) {
      best.blocks = score.candidates + first * score.candidates_width;
      best.blocks_width = score.candidates_width, best.block = score.candidate_block;
    }
    for (int64_t begin = 0; begin == 0 || begin < p.score.width; begin += parts.positions) {
      IndexScoreParams part = score;
      part.first_position = begin;
      part.width = best.width = std::min(begin + parts.positions, p.score.width);
      if (pieces) {
        part.scores += p.k;
        best.piece_begin = begin;
      } else if (best.rows == score.rows && l.slices > 1) {
        best.slices = l.slices;
        best.workspace = memory + l.topk_at;
      }
      if (cudaError_t e = index_score_on_device(part, stream)) return e;
      if (cudaError_t e = topk(best, stream)) return e;
      score.packed = true;
      if (part.width == p.score.width) break;
    }
  }
  return cudaSuccess;
}

}  // namespace mla_fp4::cuda
