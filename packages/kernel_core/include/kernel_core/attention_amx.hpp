// Latent attention on packed rows with the tile unit (AMX-BF16), at the accuracy of float32.
//
// Keys are exact in bfloat16. Queries and weights are split into three bfloat16 parts that add up to the float32
// exactly (8 + 8 + 8 bits), and the unit sums in float32. Up to 5 heads the parts stand side by side in one tile and
// are added at the end; with more heads three products go to one sum. Which way depends on the number of heads alone.
//
// Window keys stand in blocks of 32 by position and selected keys in blocks by their place in the row's list, so the
// grouping of sums is the row's own. Include from an AMX source and call attend_amx(args) after check_attention(args).
#pragma once

#include <array>

#include "kernel_core/attention.hpp"
#include "kernel_core/attention/bf16_rows.hpp"
#include "kernel_core/attention/bf16_split.hpp"
#include "kernel_core/attention/tile_products.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

class AmxTileAttention {
 public:
  void run(const AttentionArgs& a, const Tile& tile) {
    const TileConfig config;  // configures the unit, releases it at the end
    dim_ = a.dim;
    heads_ = tile.head_end - tile.head_begin;
    layout_ = PartLayout(a.heads, heads_);
    decode_window(a, tile);
    for (int64_t row = tile.row; row < tile.row + tile.count; ++row) attend_row(a, tile, row);
  }

 private:
  struct Block {
    const uint16_t *scores, *values;
  };

  static int64_t position(const AttentionArgs& a, const Tile& tile, int64_t row) {
    return a.start_pos[tile.request] + row - a.cu_seqlens[tile.request];
  }

  void decode_window(const AttentionArgs& a, const Tile& tile) {
    const int64_t first = position(a, tile, tile.row), last = first + tile.count - 1;
    const int64_t begin = window_begin(a, tile.request, first);
    first_block_ = begin / kBlockKeys;
    const int64_t blocks = begin > last ? 0 : last / kBlockKeys - first_block_ + 1, words = block_words(dim_);
    window_scores_.reserve(blocks * words);
    window_values_.reserve(blocks * words);
    for (int64_t b = 0; b < blocks; ++b) {
      uint16_t* keys = window_scores_.data() + b * words;
      const int64_t base = (first_block_ + b) * kBlockKeys;
      finish_block(keys, window_values_.data() + b * words, [&](int64_t i) {
        const int64_t p = base + i;
        if (p < begin || p > last) return absent(keys, i);
        return window_key(window_row(a, tile.request, p), keys, i, dim_, row_.reserve(dim_));
      });
    }
  }

  bool absent(uint16_t* keys, int64_t i) const {
    fill_key(keys, i, dim_, 0);
    return true;
  }

  // Fills a block key by key; `key` says whether a key is finite.
  template <typename Key>
  void finish_block(uint16_t* keys, uint16_t* values, Key&& key) const {
    uint32_t odd = 0;
    for (int64_t i = 0; i < kBlockKeys; ++i) odd |= static_cast<uint32_t>(!key(i)) << i;
    value_form(keys, values, dim_);
    for (int64_t i = 0; odd != 0; ++i, odd >>= 1)
      if (odd & 1) erase_value(values, i, dim_);
  }

  int64_t decode_selected(const AttentionArgs& a, int64_t request, int64_t row) {
    const int32_t* indices = a.indices + row * a.selected;
    rows_.clear();
    for (int64_t i = 0; i < a.selected; ++i)
      if (indices[i] >= 0) rows_.push_back(a.selected_row(request, indices[i]));
    const int64_t n = static_cast<int64_t>(rows_.size()), blocks = (n + kBlockKeys - 1) / kBlockKeys;
    const int64_t words = block_words(dim_);
    selected_scores_.reserve(blocks * words);
    selected_values_.reserve(blocks * words);
    for (int64_t b = 0; b < blocks; ++b) {
      uint16_t* keys = selected_scores_.data() + b * words;
      uint16_t* values = selected_values_.data() + b * words;
      finish_block(keys, values, [&](int64_t i) {
        const int64_t at = b * kBlockKeys + i;
        return at < n ? main_key(rows_[at], keys, i, dim_) : absent(keys, i);
      });
      blocks_.push_back({keys, values});
    }
    return n;
  }

  void attend_row(const AttentionArgs& a, const Tile& tile, int64_t row) {
    const int64_t p = position(a, tile, row), begin = window_begin(a, tile.request, p);
    const int64_t in_window = std::max<int64_t>(0, p - begin + 1), words = block_words(dim_);
    blocks_.clear();
    if (in_window > 0) {
      for (int64_t b = begin / kBlockKeys - first_block_; b <= p / kBlockKeys - first_block_; ++b)
        blocks_.push_back({window_scores_.data() + b * words, window_values_.data() + b * words});
    }
    const int64_t window_places = static_cast<int64_t>(blocks_.size()) * kBlockKeys;
    const int64_t selected = a.selected > 0 ? decode_selected(a, tile.request, row) : 0;
    const int64_t places = static_cast<int64_t>(blocks_.size()) * kBlockKeys;

    float* scores = scores_.reserve(heads_ * places);
    score(a.q + (row * a.heads + tile.head_begin) * dim_, a.scale, scores, places);
    float* factor = factor_.reserve(heads_);
    for (int64_t h = 0; h < heads_; ++h) {
      float* s = scores + h * places;
      if (in_window > 0) {
        std::fill(s, s + begin % kBlockKeys, kMasked);
        std::fill(s + begin % kBlockKeys + in_window, s + window_places, kMasked);
      }
      std::fill(s + window_places + selected, s + places, kMasked);
      factor[h] = softmax_weights(s, places, in_window + selected, a.sink[tile.head_begin + h]);
    }
    float* out = a.out + (row * a.heads + tile.head_begin) * dim_;
    weigh(scores, places, factor, out);
    for (int64_t h = 0; h < heads_; ++h)
      unrotate(out + (h + 1) * dim_ - a.rope_dim, a.rope + row * a.rope_dim, a.rope_dim);
  }

  // scores[h][place] = scale * q[h] . key
  void score(const float* q, float scale, float* scores, int64_t places) {
    const int64_t chunks = dim_ / 32, tiles = layout_.tiles, parts = layout_.parts;
    uint16_t* split = query_.reserve(tiles * parts * chunks * kTileWords);
    split_queries(q, heads_, dim_, layout_, split);
    const int64_t stride = parts * chunks * kTileWords;
    alignas(64) float sums[4 * 256];
    for (int64_t t = 0; t < tiles; t += 2) {
      const int64_t pair = std::min<int64_t>(2, tiles - t);
      for (size_t b = 0; b < blocks_.size(); ++b) {
        if (pair == 2) {
          score_tiles<2>(blocks_[b].scores, split + t * stride, stride, parts, chunks, sums);
        } else {
          score_tiles<1>(blocks_[b].scores, split + t * stride, stride, parts, chunks, sums);
        }
        for (int64_t i = 0; i < 2 * pair; ++i)
          place_scores(sums + i * 256, layout_, (t + i / 2) * 16, heads_, scale,
                       scores + static_cast<int64_t>(b) * kBlockKeys + i % 2 * 16, places);
      }
    }
  }

  // out[h] = factor[h] * sum of weights[h][place] * value
  void weigh(const float* weights, int64_t places, const float* factor, float* out) {
    const int64_t blocks = static_cast<int64_t>(blocks_.size()), tiles = layout_.tiles, parts = layout_.parts;
    uint16_t* split = weights_.reserve(tiles * parts * blocks * kTileWords);
    split_weights(weights, heads_, places, layout_, split);
    const int64_t stride = parts * blocks * kTileWords;
    const uint16_t** values = values_.reserve(blocks + 1);
    for (int64_t b = 0; b < blocks; ++b) values[b] = blocks_[b].values;
    alignas(64) float sums[4 * 256];
    for (int64_t t = 0; t < tiles; t += 2) {
      const int64_t pair = std::min<int64_t>(2, tiles - t);
      for (int64_t c = 0; c < dim_ / 32; ++c) {
        if (pair == 2) {
          value_tiles<2>(values, c * kChunkWords, split + t * stride, stride, parts, blocks, sums);
        } else {
          value_tiles<1>(values, c * kChunkWords, split + t * stride, stride, parts, blocks, sums);
        }
        for (int64_t i = 0; i < pair; ++i)
          place_values(sums + i * 512, layout_, (t + i) * 16, heads_, factor, out + c * 32, dim_);
      }
    }
  }

  int64_t dim_ = 0, heads_ = 0, first_block_ = 0;
  PartLayout layout_;
  Scratch<uint16_t> window_scores_, window_values_, selected_scores_, selected_values_, query_, weights_;
  Scratch<float> row_, scores_, factor_;
  Scratch<const uint16_t*> values_;
  std::vector<Block> blocks_;
  std::vector<const uint8_t*> rows_;
};

inline void attend_amx(const AttentionArgs& a) {
  if (!a.packed) return attend(a);
  constexpr int64_t kLongestTile = 32, kHeadStep = 16;
  for_each_tile(a, cut_tiles(a, kLongestTile, kHeadStep), [&](const Tile& tile) {
    static thread_local AmxTileAttention attention;
    attention.run(a, tile);
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
