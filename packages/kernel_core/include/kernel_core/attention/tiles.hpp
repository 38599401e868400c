// Cutting one attention call into tiles: consecutive rows of one request that share window keys.
//
// How rows are cut changes the speed, never a value: each row's keys, their order and its sums are its own.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "kernel_core/attention/args.hpp"
#include "kernel_core/parallel.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

struct Tile {
  int64_t request, row, count;   // rows [row, row + count) of the flattened batch
  int64_t head_begin, head_end;  // a share of the heads
};

// The window keys of the row at `position` are [window_begin, window_last]; begin above last means none.
inline int64_t window_begin(const AttentionArgs& a, int64_t request, int64_t position) {
  const int64_t reach = a.block ? a.start_pos[request] - a.window : position - a.window + 1;
  return std::max<int64_t>({0, a.lower[request], reach});
}
inline int64_t window_last(const AttentionArgs& a, int64_t request, int64_t position) {
  return a.block ? a.start_pos[request] + a.cu_seqlens[request + 1] - a.cu_seqlens[request] - 1 : position;
}

inline const uint8_t* window_row(const AttentionArgs& a, int64_t request, int64_t position) {
  const int64_t start = a.start_pos[request], bytes = a.window_row_bytes();
  if (position >= start) return a.new_rows + (a.cu_seqlens[request] + position - start) * bytes;
  return a.ring + (a.ring_slot[request] * a.ring_rows + position % a.ring_rows) * bytes;
}

// Long tiles decode a window key once for many rows; short ones keep every thread busy. A lone row of many heads is
// shared out by heads, in multiples of `head_step`.
inline std::vector<Tile> cut_tiles(const AttentionArgs& a, int64_t longest, int64_t head_step) {
  const int64_t threads = omp_get_max_threads();
  const int64_t length = std::clamp<int64_t>(a.rows / (2 * threads), 4, longest);
  std::vector<Tile> tiles;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t row = a.cu_seqlens[b]; row < a.cu_seqlens[b + 1]; row += length)
      tiles.push_back({b, row, std::min<int64_t>(length, a.cu_seqlens[b + 1] - row), 0, a.heads});
  }
  const int64_t shares = std::min<int64_t>(threads, a.heads / head_step);
  if (static_cast<int64_t>(tiles.size()) >= threads || shares < 2) return tiles;
  std::vector<Tile> shared;
  const int64_t step = (a.heads + shares * head_step - 1) / (shares * head_step) * head_step;
  for (const Tile& tile : tiles) {
    for (int64_t h = 0; h < a.heads; h += step)
      shared.push_back({tile.request, tile.row, tile.count, h, std::min(h + step, a.heads)});
  }
  return shared;
}

template <typename F>
inline void for_each_tile(const AttentionArgs& a, const std::vector<Tile>& tiles, F&& attend) {
  if (tiles.empty()) return;
  const int64_t keys = std::min(a.window, a.ring_rows + a.rows) + a.selected;
  const int64_t cost = std::max<int64_t>(1, a.rows * a.heads * keys * a.dim / 8 / static_cast<int64_t>(tiles.size()));
  parallel_for(static_cast<int64_t>(tiles.size()), cost, [&](int64_t i) { attend(tiles[i]); });
}

// Inverse RoPE of the end of one head: adjacent pairs, conjugate rotation (docs/model.md, Attention).
inline void unrotate(float* x, const float* rope, int64_t rope_dim) {
  const float *cos = rope, *sin = rope + rope_dim / 2;
  for (int64_t i = 0; i < rope_dim / 2; ++i) {
    const float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = even * cos[i] + odd * sin[i];
    x[2 * i + 1] = odd * cos[i] - even * sin[i];
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
