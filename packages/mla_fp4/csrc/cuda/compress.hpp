// Ratio-2 pooling on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla_fp4::cuda {

struct CompressParams {
  const float* kv;         // [rows, d], 16-byte aligned as are gate, tail and out
  const float* gate;       // [rows, d]
  float* tail;             // [slots, ring, 2, d]: gate and value of position p in row p mod ring
  const int32_t* slot;     // [batch]; requests with rows have distinct slots
  const int32_t* cu;       // [batch + 1]
  const int64_t* start;    // [batch]
  float* out;              // [groups, d]
  int64_t batch, rows, d;  // d a multiple of 4
  int64_t slots, ring;     // ring up to 65536
  int64_t groups;          // rows of `out`: pairs completed by all requests together
};

// Two launches: every pair is pooled before the tail changes.
cudaError_t compress(const CompressParams& params, cudaStream_t stream);

}  // namespace mla_fp4::cuda
