// What the attention kernels take: device pointers and sizes, nothing of CUDA. Shapes as in mla_fp4.sparse_attention.
#pragma once

#include <cstdint>

namespace mla_fp4::cuda {

struct AttentionParams {
  const void* q;  // bfloat16 [rows, heads, 512], rotated
  void* out;      // bfloat16 [rows, heads, 512]
  int64_t rows, heads;

  // request b owns rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, at positions start_pos[b], ...
  const int32_t* cu_seqlens;  // [batch + 1]
  const int64_t* start_pos;   // [batch]
  int64_t batch;

  // window keys: positions below start_pos in the ring, the rest in new_rows; none below lower[b]
  const uint8_t* new_rows;  // [rows, 528]
  const uint8_t* ring;      // [slots, ring_rows, 528]
  int64_t slots, ring_rows;
  const int32_t* ring_slot;  // [batch]
  const int64_t* lower;      // [batch]
  int64_t window;            // at most 128

  // selected keys: compressed positions in any order, -1 selects nothing
  const int32_t* indices;  // [rows, selected]
  int64_t selected;
  const uint8_t* pages;  // [blocks, rows_per_block, 288]
  int64_t blocks, rows_per_block;
  const int32_t* block_table;  // [batch, table_width]
  int64_t table_width;

  const float* sink;  // [heads], not scaled
  const float* rope;  // [rows, 64]: cosines, then sines
  float scale;

  // Chunks of 128 keys that one CTA walks. Below the number of chunks, each chunk's partial result goes to `workspace`
  // and a second kernel merges them: more parallel, for few rows. 0: all. The bits of `out` do not depend on it.
  int64_t splits;
  float* workspace;  // 16-byte aligned; attention_workspace_floats of them, none where one CTA walks all
};

inline constexpr int64_t kChunkKeys = 128;

// Chunk 0 is the window, the others 128 places each of the index list.
constexpr int64_t attention_chunks(int64_t selected) { return 1 + (selected + kChunkKeys - 1) / kChunkKeys; }

constexpr bool attention_is_split(int64_t selected, int64_t splits) {
  return splits > 0 && splits < attention_chunks(selected);
}

// 512 sums and (maximum, two denominators, nothing) for each row, head and chunk.
constexpr int64_t attention_workspace_floats(int64_t rows, int64_t heads, int64_t selected, int64_t splits) {
  return attention_is_split(selected, splits) ? rows * heads * attention_chunks(selected) * (512 + 4) : 0;
}

// What a caller without a better idea passes: one chunk a CTA until the rows alone fill the device twice.
constexpr int64_t attention_splits(int64_t rows, int64_t heads, int64_t multiprocessors) {
  const int64_t tiles = rows * (heads <= 64 ? 1 : heads / 64);
  return tiles >= 2 * multiprocessors ? 0 : 1;
}

}  // namespace mla_fp4::cuda
