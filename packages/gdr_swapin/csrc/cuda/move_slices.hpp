// Slices of cache blocks into paged pools: what a launch moves, shared by the kernels, their launch and host tests.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gdr_swapin::cuda {

// One source layer. A block's slice is its index page, then its main rows, contiguous at the source and apart in the
// pools: page b of `index`, page b of `main`, each as long as its part. Sizes and addresses are multiples of 16 bytes.
struct SliceLayer {
  int64_t offset;        // of the slice in a source block
  uint32_t index_bytes;  // of a page
  uint32_t main_bytes;
  uint8_t* index;  // pool, page 0
  uint8_t* main;
  uint32_t parts = 0;  // pieces of a slice; `with_parts` fills it in
};

struct MoveParams {
  static constexpr int most_layers = 8;
  const uint8_t* source;
  int64_t source_stride;  // bytes from block to block at the source
  const int32_t* slots;   // source block of item i; null: i itself
  const int32_t* blocks;  // page of item i in the pools
  int64_t count;          // blocks
  uint32_t piece;         // bytes of one asynchronous copy from the source
  int layers;             // in the order of `group_ends`
  SliceLayer layer[most_layers];
  uint32_t group_ends = 0;   // bit l: a group ends with layer l. Groups follow each other, in one a block's layers do;
                             // 0: each layer alone
  uint32_t* done = nullptr;  // null, or a counter a group: each CTA of move_bulk adds 1 when its share is written
  bool stream_once = false;  // tell the L2 cache that what is read will not be read again
};

// By `ctas` blocks of one warp: asynchronous bulk copies through a ring of `stages` pieces in shared memory.
cudaError_t move_bulk(const MoveParams& p, int ctas, int stages, cudaStream_t stream);
// By `ctas` blocks of 512 threads with ordinary 16-byte loads and stores; a thread has `loads` (1, 4, 8) under way.
cudaError_t move_plain(const MoveParams& p, int ctas, int loads, cudaStream_t stream);
// Shared memory of a CTA of move_bulk in bytes.
int64_t move_bulk_shared(uint32_t piece, int stages);

}  // namespace gdr_swapin::cuda
