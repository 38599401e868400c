// Latent attention over window rows and selected rows with one softmax, in float32 (docs/model.md, Attention).
//
// All heads of a row share its keys, so a key is decoded once and meets every head. Keys stand in one order: window
// rows by position, then selected rows as listed. All scores of a row are kept, so the softmax takes its maximum once
// and nothing is rescaled. Include from a KERNELS source and call attend(args) after check_attention(args).
#pragma once

#include "kernel_core/attention/blocks.hpp"
#include "kernel_core/attention/rows.hpp"
#include "kernel_core/attention/scratch.hpp"
#include "kernel_core/attention/softmax.hpp"
#include "kernel_core/attention/tiles.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

class TileAttention {
 public:
  // One tile, row by row; window rows are decoded when the first row of the tile meets them.
  void run(const AttentionArgs& a, const Tile& tile) {
    const int64_t first = position(a, tile, tile.row), last = window_last(a, tile.request, first + tile.count - 1);
    origin_ = std::min(window_begin(a, tile.request, first), last + 1);
    decoded_ = origin_;
    if (a.packed) window_.reserve((last + 1 - origin_) * a.dim);
    for (int64_t row = tile.row; row < tile.row + tile.count; ++row) attend_row(a, tile, row);
  }

 private:
  static int64_t position(const AttentionArgs& a, const Tile& tile, int64_t row) {
    return a.start_pos[tile.request] + row - a.cu_seqlens[tile.request];
  }

  const float* window_key(const AttentionArgs& a, const Tile& tile, int64_t position) {
    if (!a.packed) return reinterpret_cast<const float*>(window_row(a, tile.request, position));
    float* keys = window_.data();
    for (; decoded_ <= position; ++decoded_)
      decode_window_row_fast(window_row(a, tile.request, decoded_), keys + (decoded_ - origin_) * a.dim, a.dim);
    return keys + (position - origin_) * a.dim;
  }

  void attend_row(const AttentionArgs& a, const Tile& tile, int64_t row) {
    const int64_t heads = tile.head_end - tile.head_begin, dim = a.dim;
    const int64_t p = position(a, tile, row), begin = window_begin(a, tile.request, p);
    const int64_t last = window_last(a, tile.request, p);
    const int64_t in_window = std::max<int64_t>(0, last - begin + 1), most = in_window + a.selected;
    const int64_t stride = (most + 15) / 16 * 16;
    const float** keys = keys_.reserve(most + kKeyBlock);
    float* scores = scores_.reserve(heads * (stride + 1));
    float* factor = scores + heads * stride;
    float* selected = a.packed ? selected_.reserve(a.selected * dim) : nullptr;
    const float* q = a.q + (row * a.heads + tile.head_begin) * dim;
    float* out = a.out + (row * a.heads + tile.head_begin) * dim;

    // A key meets the heads right after it was decoded, while it is in the first-level cache.
    int64_t n = 0, scored = 0;
    const auto add = [&](const float* key) {
      keys[n++] = key;
      if (n - scored == kKeyBlock) {
        score(q, keys + scored, dim, a.scale, heads, scores + scored, stride);
        scored = n;
      }
    };
    for (int64_t i = 0; i < in_window; ++i) add(window_key(a, tile, begin + i));
    for (int64_t i = 0; i < a.selected; ++i) {
      const int64_t j = a.indices[row * a.selected + i];
      if (j < 0) continue;
      const uint8_t* bytes = a.selected_row(tile.request, j);
      if (!a.packed) {
        add(reinterpret_cast<const float*>(bytes));
      } else {
        decode_main_row_fast(bytes, selected, dim);
        add(selected);
        selected += dim;
      }
    }
    if (scored < n) {
      for (int64_t i = n; i < scored + kKeyBlock; ++i) keys[i] = keys[n - 1];
      score(q, keys + scored, dim, a.scale, heads, scores + scored, stride);
    }

    const int64_t padded = (n + 15) / 16 * 16;
    for (int64_t h = 0; h < heads; ++h) {
      float* s = scores + h * stride;
      std::fill(s + n, s + padded, kMasked);
      factor[h] = softmax_weights(s, padded, n, a.sink[tile.head_begin + h]);
    }
    values(scores, stride, keys, n, factor, out, heads, dim);
    for (int64_t h = 0; h < heads; ++h)
      unrotate(out + (h + 1) * dim - a.rope_dim, a.rope + row * a.rope_dim, a.rope_dim);
  }

  static void score(const float* q, const float* const* keys, int64_t dim, float scale, int64_t heads, float* scores,
                    int64_t stride) {
    for (int64_t h = 0; h < heads; h += kHeadBlock) {
      const float* rows[kHeadBlock];
      for (int64_t i = 0; i < kHeadBlock; ++i) rows[i] = q + std::min(h + i, heads - 1) * dim;
      score_block(rows, keys, dim, scale, std::min<int64_t>(kHeadBlock, heads - h), scores + h * stride, stride);
    }
  }

  Scratch<float> window_, selected_, scores_;
  Scratch<const float*> keys_;
  int64_t origin_ = 0, decoded_ = 0;
};

inline void attend(const AttentionArgs& a) {
  constexpr int64_t kLongestTile = 32, kHeadStep = 16;
  for_each_tile(a, cut_tiles(a, kLongestTile, kHeadStep), [&](const Tile& tile) {
    static thread_local TileAttention attention;
    attention.run(a, tile);
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
