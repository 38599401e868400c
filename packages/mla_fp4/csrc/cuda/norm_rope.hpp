// RMSNorm and rotary embedding on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla_fp4::cuda {

enum class Dtype : int { float32 = 0, bfloat16 = 1 };

struct NormRopeParams {
  const void* x;        // [rows * group, d], 16-byte aligned as are all pointers here
  const float* weight;  // [d], or null: no norm
  const float* rope;    // [rows, rope_dim]: cosines, then sines; or null: no rotation
  void* out;            // may be x where the types are equal
  int64_t rows;
  int64_t group;     // vectors that share one row's angles
  int64_t d;         // a multiple of 8 up to 8192
  int64_t rope_dim;  // a multiple of 8 up to d
  float eps;
  bool inverse;
  Dtype in, to;
};

// out = x / sqrt(mean(x^2) + eps) * weight, then pairs of the last rope_dim channels turned, in float32. A vector's
// bits depend on the vector alone.
cudaError_t norm_rope(const NormRopeParams& params, cudaStream_t stream);

}  // namespace mla_fp4::cuda
