// Copies by the copy engines: many pieces in one call where the driver can, else one call a piece.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace gdr_swapin::cuda {

// Arrays of `count` addresses and sizes; read during the call, so the caller may free them after it.
struct Pieces {
  const uint64_t* targets;
  const uint64_t* sources;
  const uint64_t* sizes;
  int64_t count;
};

// `rows` rows of `widths` bytes, `pitches` bytes from row to row; read during the call too.
struct StridedPieces {
  const uint64_t* targets;
  const uint64_t* target_pitches;
  const uint64_t* sources;
  const uint64_t* source_pitches;
  const uint64_t* widths;
  const uint64_t* rows;
  int64_t count;
};

// Whether the driver has cuMemcpyBatchAsync (12.8 and later). Asked once.
bool has_batch();

// At most `per_call` pieces a call, which callers keep at 256 or below: with 1,024 on four streams blocks came out
// wrong on one H200 though no call failed. `any_order`: sources are stable and may be read before earlier work of the
// stream. On failure `*queued` says how many pieces were queued before it.
cudaError_t copy_batch(const Pieces& pieces, int64_t per_call, bool any_order, bool prefer_overlap, cudaStream_t stream,
                       int64_t* queued);
cudaError_t copy_each(const Pieces& pieces, cudaStream_t stream, int64_t* queued);
// The same for strided pieces, by cuMemcpy3DBatchAsync, or one call a piece without it.
cudaError_t copy_strided(const StridedPieces& pieces, int64_t per_call, bool any_order, bool prefer_overlap,
                         cudaStream_t stream, int64_t* queued);
// `rows` rows of `width` bytes at regular distances on both sides.
cudaError_t copy_rows(void* to, uint64_t to_pitch, const void* from, uint64_t from_pitch, uint64_t width, uint64_t rows,
                      cudaStream_t stream);

}  // namespace gdr_swapin::cuda
