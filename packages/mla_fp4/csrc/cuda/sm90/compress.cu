// Ratio-2 pooling: one warp a row, 16 bytes a lane. Pairs are pooled in one launch and the tail is stored in a second,
// since a long step overwrites the very tail row that its first pair reads.
#include "cuda/compress.hpp"

#include "cuda/sm90/pair_math.cuh"
#include "kernel_core/cuda/ragged.cuh"
#include "kernel_core/cuda/warp.cuh"

namespace mla_fp4::cuda {
namespace {

constexpr int kWarps = 4;

__device__ __forceinline__ int64_t row_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

__device__ __forceinline__ float* tail_row(const CompressParams& p, int64_t slot, int64_t position) {
  return p.tail + ring_row(slot, position, p.ring) * 2 * p.d;
}

__global__ void __launch_bounds__(kWarps * 32) pool_kernel(CompressParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t row = row_of_warp();
  if (row >= p.rows) return;
  const BatchRow at = locate_row(p.cu, p.start, p.batch, row);
  if (at.request >= p.batch || !completes_pair(at.position)) return;
  // Pairs of the requests before this one; whole numbers, so the order of the sum does not matter
  int64_t before = 0;
  for (int64_t b = lane; b < at.request; b += 32) before += request_pairs(p.cu, p.start, b);
  const int64_t group = warp_sum(before) + pair_in_request(at.position, p.start[at.request]);
  if (group < 0 || group >= p.groups) return;

  const float *gate0 = p.gate + (row - 1) * p.d, *kv0 = p.kv + (row - 1) * p.d;
  bool known = true;
  if (row == at.first) {  // the partner came in an earlier step
    const int64_t slot = p.slot[at.request];
    known = slot >= 0 && slot < p.slots;
    gate0 = known ? tail_row(p, slot, at.position - 1) : p.gate + row * p.d;
    kv0 = known ? gate0 + p.d : p.kv + row * p.d;
  }
  const float *gate1 = p.gate + row * p.d, *kv1 = p.kv + row * p.d;
  for (int64_t i = lane * 4; i < p.d; i += 128) {
    float g0[4], g1[4], v0[4], v1[4];
    load_values(gate0 + i, g0), load_values(gate1 + i, g1), load_values(kv0 + i, v0), load_values(kv1 + i, v1);
#pragma unroll
    for (int j = 0; j < 4; ++j) v0[j] = known ? pool_pair(g0[j], g1[j], v0[j], v1[j]) : bits_float(0x7FC00000);
    store_values(p.out + group * p.d + i, v0);
  }
}

__global__ void __launch_bounds__(kWarps * 32) store_tail_kernel(CompressParams p) {
  const int64_t row = row_of_warp();
  if (row >= p.rows) return;
  const BatchRow at = locate_row(p.cu, p.start, p.batch, row);
  if (at.request >= p.batch || at.position < 0 || !ring_keeps(at.position, at.end, p.ring, 0)) return;
  const int64_t slot = p.slot[at.request];
  if (slot < 0 || slot >= p.slots) return;
  const auto copy = [&](float* to, const float* from) {
    warp_copy<uint4>(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from + row * p.d), p.d * 4,
                     threadIdx.x % 32);
  };
  float* to = tail_row(p, slot, at.position);
  copy(to, p.gate);
  copy(to + p.d, p.kv);
}

bool usable(const void* p) { return p && reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

cudaError_t compress(const CompressParams& p, cudaStream_t stream) {
  if (p.batch < 0 || p.rows < 0 || p.d <= 0 || p.d % 4 || p.slots < 0 || p.ring <= 0 || p.groups < 0)
    return cudaErrorInvalidValue;
  if (p.ring > kMaxRing) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.batch == 0) return cudaSuccess;
  if (!usable(p.kv) || !usable(p.gate) || !usable(p.tail) || !p.slot || !p.cu || !p.start) return cudaErrorInvalidValue;
  if (p.groups && !usable(p.out)) return cudaErrorInvalidValue;
  const int64_t blocks = (p.rows + kWarps - 1) / kWarps;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (p.groups) pool_kernel<<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(p);
  const cudaError_t pooled = cudaGetLastError();
  if (pooled != cudaSuccess) return pooled;
  store_tail_kernel<<<static_cast<unsigned>(blocks), kWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace mla_fp4::cuda
