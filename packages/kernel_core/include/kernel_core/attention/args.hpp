// What the bindings and the attention kernels of every instruction set share: plain data and its checks.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kernel_core {

inline constexpr int64_t kMaxPosition = int64_t{1} << 48;  // far above any context, far below overflow

// One attention call over a ragged batch (docs/model.md, Attention): a window of recent rows, selected compressed rows,
// one softmax. Rows are bytes; `packed` says whether they hold the FP4 / FP8 formats or plain float32.
struct AttentionArgs {
  const float* q;  // [rows, heads, dim], RoPE applied
  float* out;      // [rows, heads, dim]
  int64_t rows, heads, dim;
  bool packed;

  // the batch: request b owns rows cu_seqlens[b] .. cu_seqlens[b + 1] at positions start_pos[b], ...
  const int32_t* cu_seqlens;
  const int64_t* start_pos;
  int64_t batch;

  // window keys: positions below start_pos in the ring, the rest in new_rows; none below lower[b]
  const uint8_t* new_rows;  // [rows, row]
  const uint8_t* ring;      // [slots, ring_rows, row], row = position mod ring_rows
  int64_t slots, ring_rows;
  const int32_t* ring_slot;
  const int64_t* lower;
  int64_t window;
  bool block;  // a row sees all new rows of its request, later ones too, and `window` positions before the first

  // selected keys: compressed positions, -1 selects nothing
  const int32_t* indices;  // [rows, selected]
  int64_t selected;
  const uint8_t* pages;  // [blocks, rows_per_block, row]
  int64_t blocks, rows_per_block;
  const int32_t* block_table;  // [batch, table_width]
  int64_t table_width;

  const float* sink;  // [heads]: a logit in the denominator only, not scaled
  const float* rope;  // [rows, rope_dim]: cos then sin; its inverse turns the end of each output
  int64_t rope_dim;
  float scale;

  int64_t window_row_bytes() const { return packed ? dim + dim / 32 : dim * 4; }
  int64_t main_row_bytes() const { return packed ? dim / 2 + dim / 16 : dim * 4; }
  const uint8_t* selected_row(int64_t request, int64_t position) const {
    const int64_t block = block_table[request * table_width + position / rows_per_block];
    return pages + (block * rows_per_block + position % rows_per_block) * main_row_bytes();
  }
};

namespace detail {
[[noreturn]] inline void fail(const std::string& argument, int64_t got, const std::string& allowed) {
  throw std::invalid_argument(argument + ": got " + std::to_string(got) + ", allowed is " + allowed);
}
inline std::string at(int64_t i) { return "[" + std::to_string(i) + "]"; }
inline std::string at(int64_t i, int64_t j) { return "[" + std::to_string(i) + ", " + std::to_string(j) + "]"; }
}  // namespace detail

// The geometry that every ragged batch has. `slots` is the number of rings.
inline void check_batch(const int32_t* cu_seqlens, const int64_t* start_pos, const int32_t* ring_slot, int64_t batch,
                        int64_t rows, int64_t slots) {
  using detail::at;
  using detail::fail;
  if (cu_seqlens[0] != 0) fail("cu_seqlens[0]", cu_seqlens[0], "0");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t first = cu_seqlens[b], end = cu_seqlens[b + 1];
    if (end < first || end > rows)
      fail("cu_seqlens" + at(b + 1), end, std::to_string(first) + " to " + std::to_string(rows));
    if (end == first) continue;
    if (start_pos[b] < 0 || start_pos[b] > kMaxPosition)
      fail("start_pos" + at(b), start_pos[b], "0 to " + std::to_string(kMaxPosition));
    if (ring_slot[b] < 0 || ring_slot[b] >= slots)
      fail("ring_slot" + at(b), ring_slot[b], "0 to " + std::to_string(slots - 1));
  }
  if (cu_seqlens[batch] != rows)
    fail("cu_seqlens[-1]", cu_seqlens[batch], std::to_string(rows) + ", the number of rows");
}

// Every index has to name a row that exists. Nothing is written before this has passed.
inline void check_attention(const AttentionArgs& a) {
  using detail::at;
  using detail::fail;
  check_batch(a.cu_seqlens, a.start_pos, a.ring_slot, a.batch, a.rows, a.slots);
  const int64_t reach = a.table_width * a.rows_per_block;
  for (int64_t b = 0; a.selected > 0 && b < a.batch; ++b) {
    for (int64_t i = a.cu_seqlens[b] * a.selected; i < a.cu_seqlens[b + 1] * a.selected; ++i) {
      const int64_t j = a.indices[i];
      if (j < 0) continue;
      if (j >= reach)
        fail("indices" + at(i / a.selected, i % a.selected), j,
             "-1 or a position below " + std::to_string(reach) + ", the reach of block_table");
      const int64_t block = a.block_table[b * a.table_width + j / a.rows_per_block];
      if (block < 0 || block >= a.blocks)
        fail("block_table" + at(b, j / a.rows_per_block), block, "0 to " + std::to_string(a.blocks - 1));
    }
  }
}

}  // namespace kernel_core
