// Latent attention on packed rows with the tile unit (AMX-BF16), at the accuracy of float32.
//
// Keys are exact in bfloat16. Queries and weights are split into three bfloat16 parts that add up to the float32
// exactly (8 + 8 + 8 bits), and the unit sums in float32. Up to 5 heads the parts stand side by side in one tile and
// are added at the end; with more heads three products go to one sum. Which way depends on the number of heads alone.
//
// Window keys stand in blocks of 32 by position and selected keys in blocks by their place in the row's list, so the
// grouping of sums is the row's own. Include from an AMX source and call attend_amx(args) after check_attention(args).
#pragma once

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
    block_.reserve(std::max(block_words(dim_), 4 * kChunkWords));
    floats_.reserve(dim_);
    decode_window(a, tile);
    for (int64_t row = tile.row; row < tile.row + tile.count; ++row) attend_row(a, tile, row);
  }

 private:
  static int64_t position(const AttentionArgs& a, const Tile& tile, int64_t row) {
    return a.start_pos[tile.request] + row - a.cu_seqlens[tile.request];
  }

  // Rows of window block `block`, null where no row of the tile sees the position.
  void window_rows(const AttentionArgs& a, int64_t request, int64_t block, const uint8_t** rows) const {
    const int64_t first = block * kBlockKeys, start = a.start_pos[request], bytes = a.window_row_bytes();
    const uint8_t* ring = a.ring + a.ring_slot[request] * a.ring_rows * bytes;
    const uint8_t* fresh = a.new_rows + (a.cu_seqlens[request] - start) * bytes;
    int64_t turn = first % a.ring_rows;
    for (int64_t i = 0; i < kBlockKeys; ++i, turn = turn + 1 == a.ring_rows ? 0 : turn + 1) {
      const int64_t p = first + i;
      rows[i] = p < begin_ || p > last_ ? nullptr : p < start ? ring + turn * bytes : fresh + p * bytes;
    }
  }

  // Several rows share the window, so its blocks are decoded once and kept. A lone row decodes them as it goes.
  void decode_window(const AttentionArgs& a, const Tile& tile) {
    const int64_t first = position(a, tile, tile.row);
    last_ = window_last(a, tile.request, first + tile.count - 1);
    begin_ = window_begin(a, tile.request, first);
    first_block_ = begin_ / kBlockKeys;
    const int64_t blocks = begin_ > last_ ? 0 : last_ / kBlockKeys - first_block_ + 1, words = block_words(dim_);
    window_values_.reserve(blocks * words);
    if (tile.count == 1) return;
    window_scores_.reserve(blocks * words);
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* rows[kBlockKeys];
      window_rows(a, tile.request, first_block_ + b, rows);
      decode_window_block(block_rows_, rows, window_scores_.data() + b * words, window_values_.data() + b * words, dim_,
                          floats_.data());
    }
  }

  void attend_row(const AttentionArgs& a, const Tile& tile, int64_t row) {
    const int64_t p = position(a, tile, row), begin = window_begin(a, tile.request, p);
    const int64_t last = window_last(a, tile.request, p), in_window = std::max<int64_t>(0, last - begin + 1);
    const int64_t window_blocks = in_window > 0 ? last / kBlockKeys - begin / kBlockKeys + 1 : 0;
    list_selected(a, tile.request, row);
    fetch_selected(a, 0);
    const int64_t selected = static_cast<int64_t>(rows_.size());
    blocks_ = window_blocks + (selected + kBlockKeys - 1) / kBlockKeys;
    const int64_t places = blocks_ * kBlockKeys;
    scores_.reserve(heads_ * places);
    values_.reserve(blocks_ + 1);
    split_queries(a.q + (row * a.heads + tile.head_begin) * dim_, heads_, dim_, layout_,
                  query_.reserve(layout_.tiles * layout_.parts * dim_ * 16));
    if (window_blocks > 0) score_window(a, tile, begin / kBlockKeys - first_block_, window_blocks);
    score_selected(a, window_blocks);

    float* factor = factor_.reserve(heads_);
    for (int64_t h = 0; h < heads_; ++h) {
      float* s = scores_.data() + h * places;
      if (in_window > 0) {
        std::fill(s, s + begin % kBlockKeys, kMasked);
        std::fill(s + begin % kBlockKeys + in_window, s + window_blocks * kBlockKeys, kMasked);
      }
      std::fill(s + window_blocks * kBlockKeys + selected, s + places, kMasked);
      factor[h] = softmax_weights(s, places, in_window + selected, a.sink[tile.head_begin + h]);
    }
    float* out = a.out + (row * a.heads + tile.head_begin) * dim_;
    weigh(scores_.data(), places, factor, out);
    for (int64_t h = 0; h < heads_; ++h)
      unrotate(out + (h + 1) * dim_ - a.rope_dim, a.rope + row * a.rope_dim, a.rope_dim);
  }

  void list_selected(const AttentionArgs& a, int64_t request, int64_t row) {
    rows_.clear();
    for (int64_t i = row * a.selected; i < (row + 1) * a.selected; ++i)
      if (a.indices[i] >= 0) rows_.push_back(a.selected_row(request, a.indices[i]));
  }

  void score_window(const AttentionArgs& a, const Tile& tile, int64_t first, int64_t count) {
    const int64_t words = block_words(dim_);
    for (int64_t b = 0; b < count; ++b) {
      uint16_t* values = window_values_.data() + (first + b) * words;
      values_.data()[b] = values;
      if (tile.count > 1) {
        score(window_scores_.data() + (first + b) * words, b, a.scale);
        continue;
      }
      const uint8_t* rows[kBlockKeys];
      window_rows(a, tile.request, first_block_ + first + b, rows);
      if (layout_.tiles <= 2 && block_rows_.open_window(rows, dim_)) {
        score_while([&](int64_t c, uint16_t* keys) { block_rows_.window_chunk(c, keys, values + c * kChunkWords); }, b,
                    a.scale);
      } else {
        decode_window_block(block_rows_, rows, block_.data(), values, dim_, floats_.data());
        score(block_.data(), b, a.scale);
      }
    }
  }

  // Of a block of selected rows only the values are kept.
  void score_selected(const AttentionArgs& a, int64_t from) {
    const int64_t words = block_words(dim_);
    rows_.resize((blocks_ - from) * kBlockKeys, nullptr);
    uint16_t* values = selected_values_.reserve((blocks_ - from) * words);
    for (int64_t b = from; b < blocks_; ++b, values += words) {
      const uint8_t* const* rows = rows_.data() + (b - from) * kBlockKeys;
      fetch_selected(a, (b - from + 1) * kBlockKeys);
      values_.data()[b] = values;
      if (layout_.tiles <= 2 && block_rows_.open_main(rows, dim_)) {
        score_while([&](int64_t c, uint16_t* keys) { block_rows_.main_chunk(c, keys, values + c * kChunkWords); }, b,
                    a.scale);
      } else {
        decode_main_block(block_rows_, rows, block_.data(), values, dim_, floats_.data());
        score(block_.data(), b, a.scale);
      }
    }
  }

  // Selected rows lie anywhere in memory: those of a block are asked for while the one before is worked on.
  void fetch_selected(const AttentionArgs& a, int64_t from) const {
    const int64_t end = std::min<int64_t>(from + kBlockKeys, static_cast<int64_t>(rows_.size()));
    for (int64_t i = from; i < end; ++i)
      for (int64_t at = 0; at < a.main_row_bytes(); at += 64) __builtin_prefetch(rows_[i] + at);
  }

  // Scores of one decoded block, scale * q[h] . key
  void score(const uint16_t* keys, int64_t block, float scale) {
    const int64_t chunks = dim_ / 32, parts = layout_.parts;
    alignas(64) float sums[4 * 256];
    for (int64_t t = 0; t < layout_.tiles; t += 2) {
      const uint16_t* query = query_.data() + t * parts * chunks * kTileWords;
      if (layout_.tiles - t == 1) {
        score_block<1>(keys, query, parts, chunks, sums);
      } else {
        score_block<2>(keys, query, parts, chunks, sums);
      }
      place(sums, t, block, scale);
    }
  }

  // The same for a block that decode(c, keys) makes meanwhile. All query tiles have to fit the unit: two.
  template <typename Decode>
  void score_while(Decode&& decode, int64_t block, float scale) {
    alignas(64) float sums[4 * 256];
    if (layout_.tiles == 1) {
      score_decoding<1>(decode, block_.data(), query_.data(), layout_.parts, dim_ / 32, sums);
    } else {
      score_decoding<2>(decode, block_.data(), query_.data(), layout_.parts, dim_ / 32, sums);
    }
    place(sums, 0, block, scale);
  }

  void place(const float* sums, int64_t tile, int64_t block, float scale) {
    for (int64_t i = 0; i < 2 * std::min<int64_t>(2, layout_.tiles - tile); ++i)
      place_scores(sums + i * 256, layout_, (tile + i / 2) * 16, heads_, scale,
                   scores_.data() + block * kBlockKeys + i % 2 * 16, blocks_ * kBlockKeys);
  }

  // out[h] = factor[h] * sum of weights[h][place] * value
  void weigh(const float* weights, int64_t places, const float* factor, float* out) {
    const int64_t tiles = layout_.tiles, parts = layout_.parts, stride = parts * blocks_ * kTileWords;
    uint16_t* split = weights_.reserve(tiles * stride);
    split_weights(weights, heads_, places, layout_, split);
    alignas(64) float sums[4 * 256];
    for (int64_t t = 0; t < tiles; t += 2) {
      const int64_t pair = std::min<int64_t>(2, tiles - t);
      for (int64_t c = 0; c < dim_ / 32; ++c) {
        if (pair == 2) {
          value_tiles<2>(values_.data(), c * kChunkWords, split + t * stride, stride, parts, blocks_, sums);
        } else {
          value_tiles<1>(values_.data(), c * kChunkWords, split + t * stride, stride, parts, blocks_, sums);
        }
        for (int64_t i = 0; i < pair; ++i)
          place_values(sums + i * 512, layout_, (t + i) * 16, heads_, factor, out + c * 32, dim_);
      }
    }
  }

  int64_t dim_ = 0, heads_ = 0;
  int64_t begin_ = 0, last_ = 0, first_block_ = 0;  // window positions of the tile
  int64_t blocks_ = 0;                              // key blocks of the row
  PartLayout layout_;
  BlockRows block_rows_;
  Scratch<uint16_t> window_scores_, window_values_, selected_values_, block_, query_, weights_;
  Scratch<float> floats_, scores_, factor_;
  Scratch<const uint16_t*> values_;
  std::vector<const uint8_t*> rows_;  // selected rows
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
