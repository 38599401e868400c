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
};

// Heads that a CTA takes: as many as there are (64 at most), or fewer where the device would else stand idle. Measured:
// eight heads are quicker than 64 while all groups run at once, 16 or 32 are not. The bits of `out` do not depend on
// it.
constexpr int64_t attention_heads_of_cta(int64_t rows, int64_t heads, int64_t multiprocessors) {
  if (heads % 64 == 0) return rows * (heads / 8) <= multiprocessors ? 8 : 64;
  int64_t group = heads > 16 ? 32 : heads > 8 ? 16 : 8;
  while (group > 8 && rows * ((heads + group / 2 - 1) / (group / 2)) <= multiprocessors) group /= 2;
  return group;
}

}  // namespace mla_fp4::cuda
