// RMSNorm and rotary embedding: one warp a vector up to 512 channels, four warps beyond.
//
// A thread holds chunks of 8 consecutive channels in registers (16-byte accesses in both types), so x is read once and
// `out` may be x. Which channel a thread holds, and the order of the sum, follow from d alone.
#include "cuda/norm_rope.hpp"

#include "cuda/sm90/row_math.cuh"
#include "kernel_core/cuda/warp.cuh"

namespace mla_fp4::cuda {
namespace {

constexpr int kChunk = 8;
constexpr int64_t kMaxVectors = 0xFFFFFFFFll;  // a vector's row is found by a 32-bit division

template <typename In_, typename Out_, int Threads_, int Chunks_>
struct NormConfig {
  using In = In_;
  using Out = Out_;
  static constexpr int threads = Threads_;  // that share a vector
  static constexpr int chunks = Chunks_;    // a thread holds at most
  static constexpr int block = 128;
  static constexpr int vectors = block / threads;
};

template <typename Config>
__global__ void __launch_bounds__(Config::block) norm_rope_kernel(NormRopeParams p, int64_t first) {
  const int thread = threadIdx.x % Config::threads;
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * Config::vectors + threadIdx.x / Config::threads;
  if (vector >= p.rows * p.group) return;  // whole warps, and whole blocks where a block shares a vector
  const auto* x = static_cast<const typename Config::In*>(p.x) + vector * p.d;
  auto* out = static_cast<typename Config::Out*>(p.out) + vector * p.d;
  // Channels below `first` stay as they are; it is above 0 only for a rotation in place.
  const auto channel = [&](int c) { return first + static_cast<int64_t>(c * Config::threads + thread) * kChunk; };

  float values[Config::chunks][kChunk];
  float sum = 0;
#pragma unroll
  for (int c = 0; c < Config::chunks; ++c) {
    if (channel(c) >= p.d) continue;
    load_values(x + channel(c), values[c]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = __fmaf_rn(values[c][i], values[c][i], sum);
  }
  float factor = 1;
  if (p.weight) {
    sum = warp_sum(sum);
    if constexpr (Config::threads > 32) {
      __shared__ float parts[Config::threads / 32];
      if (thread % 32 == 0) parts[thread / 32] = sum;
      __syncthreads();
      sum = parts[0];
#pragma unroll
      for (int w = 1; w < Config::threads / 32; ++w) sum = add_rn(sum, parts[w]);
    }
    factor = norm_factor(sum, p.d, p.eps);
  }
  const float* angles =
      p.rope ? p.rope + static_cast<uint32_t>(vector) / static_cast<uint32_t>(p.group) * p.rope_dim : nullptr;
  const int64_t turned = p.d - (p.rope ? p.rope_dim : 0);
#pragma unroll
  for (int c = 0; c < Config::chunks; ++c) {
    const int64_t at = channel(c);
    if (at >= p.d) continue;
    float (&v)[kChunk] = values[c];
    if (p.weight) {
      float weight[kChunk];
      load_values(p.weight + at, weight);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v[i] = norm_value(v[i], factor, weight[i]);
    }
    if (angles && at >= turned) {
      float cosine[kChunk / 2], sine[kChunk / 2];
      load_values(angles + (at - turned) / 2, cosine);
      load_values(angles + p.rope_dim / 2 + (at - turned) / 2, sine);
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i)
        rotate_pair(v[2 * i], v[2 * i + 1], cosine[i], p.inverse ? -sine[i] : sine[i]);
    }
    store_values(out + at, v);
  }
}

template <typename Config>
cudaError_t launch(const NormRopeParams& p, int64_t first, cudaStream_t stream) {
  const int64_t blocks = (p.rows * p.group + Config::vectors - 1) / Config::vectors;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  norm_rope_kernel<Config><<<static_cast<unsigned>(blocks), Config::block, 0, stream>>>(p, first);
  return cudaGetLastError();
}

template <typename In, typename Out>
cudaError_t by_width(const NormRopeParams& p, cudaStream_t stream) {
  const bool in_place = p.out == p.x && !p.weight && p.rope;
  const int64_t first = in_place ? p.d - p.rope_dim : 0;
  const int64_t width = p.d - first;
  if (width <= 512) return launch<NormConfig<In, Out, 32, 2>>(p, first, stream);
  if (width <= 2048) return launch<NormConfig<In, Out, 128, 2>>(p, first, stream);
  return launch<NormConfig<In, Out, 128, 8>>(p, first, stream);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

cudaError_t norm_rope(const NormRopeParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.group < 0 || p.d <= 0 || p.d % kChunk || p.d > 8192) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.group == 0) return cudaSuccess;
  if (p.group > kMaxVectors / p.rows) return cudaErrorInvalidValue;
  if (!p.x || !p.out || !aligned(p.x) || !aligned(p.out)) return cudaErrorInvalidValue;
  if (!aligned(p.weight) || !aligned(p.rope)) return cudaErrorInvalidValue;
  if (p.rope && (p.rope_dim <= 0 || p.rope_dim % kChunk || p.rope_dim > p.d)) return cudaErrorInvalidValue;
  if (p.x == p.out && p.in != p.to) return cudaErrorInvalidValue;
  const bool from16 = p.in == Dtype::bfloat16, to16 = p.to == Dtype::bfloat16;
  if (from16)
    return to16 ? by_width<__nv_bfloat16, __nv_bfloat16>(p, stream) : by_width<__nv_bfloat16, float>(p, stream);
  return to16 ? by_width<float, __nv_bfloat16>(p, stream) : by_width<float, float>(p, stream);
}

}  // namespace mla_fp4::cuda
