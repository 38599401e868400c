// Engram on the device: hashed rows, their lookup, and the gated addition to the streams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mhc_engram::cuda {

struct EngramRowsParams {
  int64_t tokens, requests, orders, heads;
  const int64_t* mapped;       // [tokens]
  const uint8_t* dead;         // [tokens]
  const int64_t* history;      // [requests, orders]
  const int32_t* cu_seqlens;   // [requests + 1]
  const int64_t* multipliers;  // [orders + 1]
  const int64_t* primes;       // [orders * heads]
  const int64_t* offsets;      // [orders * heads]
  int64_t pad_mapped;
  int64_t* rows;  // [tokens, orders * heads]
};

struct EngramGatherParams {
  int64_t count;  // rows to look up
  int64_t dim;    // a multiple of 32
  int64_t table_rows;
  const uint8_t* table;  // E4M3 [table_rows, dim], 4-byte aligned; device memory, or host memory that the device reads
  const uint8_t* scale;  // UE8M0 [table_rows, dim / 32]
  const int64_t* rows;   // [count]; below 0: zeros
  float* out;            // [count, dim], 16-byte aligned
};

struct EngramInjectParams {
  int64_t tokens, streams, channels;  // channels: a multiple of 16 up to 8192
  float* x;                           // [tokens, streams, channels]
  const float* kv;                    // [tokens, (streams + 1) * channels]
  const float* qk_weight;             // [streams, channels]
  const uint8_t* dead;                // [tokens] or null
  float eps;
};

cudaError_t engram_rows(const EngramRowsParams& params, cudaStream_t stream);
// blocks: 0 for as many as there is work; a few dozen are enough for a table in host memory.
cudaError_t engram_gather(const EngramGatherParams& params, int64_t blocks, cudaStream_t stream);
cudaError_t engram_inject(const EngramInjectParams& params, cudaStream_t stream);

}  // namespace mhc_engram::cuda
