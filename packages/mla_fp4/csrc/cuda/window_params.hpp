// What window prefill takes: device pointers and sizes, nothing of CUDA.
#pragma once

#include <cstdint>

namespace mla_fp4::cuda {

// Meanings as in AttentionParams.
struct WindowParams {
  const void* q;  // bfloat16 [rows, heads, 512], rotated
  void* out;      // bfloat16 [rows, heads, 512]
  int64_t rows, heads;
  const int32_t* cu_seqlens;  // [batch + 1]
  const int64_t* start_pos;   // [batch]
  int64_t batch;
  const uint8_t* new_rows;  // [rows, 528]
  const uint8_t* ring;      // [slots, ring_rows, 528]
  int64_t slots, ring_rows;
  const int32_t* ring_slot;  // [batch]
  const int64_t* lower;      // [batch]
  int64_t window;            // at most 128
  const float* sink;         // [heads], not scaled
  const float* rope;         // [rows, 64]: cosines, then sines
  float scale;
  int64_t run_rows;  // rows of a request that one CTA takes at most; the bits of `out` do not depend on it
};

// A run costs the decoding of a window before its first row. So few runs, one for each multiprocessor where one request
// is all there is; about four where many requests end at uneven places.
constexpr int64_t window_run_rows(int64_t rows, int64_t heads, int64_t batch, int64_t multiprocessors) {
  constexpr int64_t kShort = 32, kLong = 64, kLongest = 128;
  const int64_t share = (rows * (heads / 64) + multiprocessors - 1) / multiprocessors;
  if (share <= kShort) return share > 1 ? share : 1;
  if (batch == 1) {
    const int64_t waves = (share + kLongest - 1) / kLongest;
    return (share + waves - 1) / waves;
  }
  const int64_t quarter = (share + 3) / 4;
  return quarter < kShort ? kShort : quarter < kLong ? quarter : kLong;
}

}  // namespace mla_fp4::cuda
