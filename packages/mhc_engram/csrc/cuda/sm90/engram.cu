// Engram kernels: a thread for each hashed row, a warp for eight pieces of looked-up rows, a block for each stream of
// a token in the gated addition.
#include "cuda/sm90/engram_math.cuh"
#include "kernel_core/cuda/warp.cuh"

namespace mhc_engram::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) engram_rows_kernel(EngramRowsParams a) {
  const int64_t columns = a.orders * a.heads;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < a.tokens * columns) a.rows[i] = engram_row(a, i / columns, i % columns);
}

// Two E4M3 bytes to two floats; both steps are exact, NaN stays.
__device__ __forceinline__ void e4m3x2_floats(uint32_t pair, float& low, float& high) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n"
      : "=f"(low), "=f"(high)
      : "r"(halves));
}

// A piece is 128 values of a row, four a lane. All loads of eight pieces are on their way before the first is used:
// rows lie anywhere, perhaps behind the link to the host. Few registers, so that many warps have such loads.
constexpr int kPieces = 8;
constexpr uint32_t kUnitScale = 127, kNanScale = 256;  // 256: a row that the table does not have

__global__ void __launch_bounds__(kThreads, 5) engram_gather_kernel(EngramGatherParams a, uint32_t pieces) {
  const uint32_t total = static_cast<uint32_t>(a.count) * pieces;
  const uint32_t lane_channel = threadIdx.x % 32 * 4;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kWarps * kPieces;
  const uint64_t begin = (static_cast<uint64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kPieces;
  for (uint64_t at = begin; at < total; at += step) {
    const uint32_t first = static_cast<uint32_t>(at), count = min(total - first, static_cast<uint32_t>(kPieces));
    int64_t row[kPieces];
    uint32_t codes[kPieces], scale[kPieces];
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) row[i] = i < count ? a.rows[(first + i) / pieces] : -1;
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      const uint32_t channel = (first + i) % pieces * 128 + lane_channel;
      codes[i] = 0, scale[i] = kUnitScale;
      if (row[i] < 0 || channel >= a.dim) continue;
      scale[i] = kNanScale;
      // A row that the table does not have cannot be told to the host; it is at least not silent.
      if (row[i] >= a.table_rows) continue;
      codes[i] = *reinterpret_cast<const uint32_t*>(a.table + row[i] * a.dim + channel);
      scale[i] = a.scale[(row[i] * a.dim + channel) / 32];
    }
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      const uint32_t channel = (first + i) % pieces * 128 + lane_channel;
      if (i >= count || channel >= a.dim) continue;
      float v[4];
      e4m3x2_floats(codes[i] & 0xFFFF, v[0], v[1]);
      e4m3x2_floats(codes[i] >> 16, v[2], v[3]);
      const float factor = scale[i] < kNanScale ? ue8m0_float(scale[i]) : bits_float(0x7FC00000);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = mul_rn(v[e], factor);
      store_values(a.out + static_cast<int64_t>((first + i) / pieces) * a.dim + channel, v);
    }
  }
}

template <int Vectors>  // of four channels that a thread holds at most
__global__ void __launch_bounds__(kThreads) engram_inject_kernel(EngramInjectParams a) {
  const int64_t token = blockIdx.x / a.streams, stream = blockIdx.x % a.streams;
  if (a.dead && a.dead[token]) return;
  const int64_t d = a.channels;
  float* x = a.x + (token * a.streams + stream) * d;
  const float* key = a.kv + (token * (a.streams + 1) + stream) * d;
  const float* value = a.kv + (token * (a.streams + 1) + a.streams) * d;
  const float* weight = a.qk_weight + stream * d;
  float held[Vectors][4];
  float sum[3] = {};  // X weight key, X^2, key^2
#pragma unroll
  for (int v = 0; v < Vectors; ++v) {
    const int64_t channel = (static_cast<int64_t>(v) * kThreads + threadIdx.x) * 4;
    if (channel >= d) continue;
    float k[4], w[4];
    load_values(x + channel, held[v]);
    load_values(key + channel, k);
    load_values(weight + channel, w);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[0] = __fmaf_rn(mul_rn(held[v][e], w[e]), k[e], sum[0]);
      sum[1] = __fmaf_rn(held[v][e], held[v][e], sum[1]);
      sum[2] = __fmaf_rn(k[e], k[e], sum[2]);
    }
  }
  __shared__ float parts[3][kWarps];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    sum[i] = warp_sum(sum[i]);
    if (threadIdx.x % 32 == 0) parts[i][threadIdx.x / 32] = sum[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    sum[i] = parts[i][0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum[i] = add_rn(sum[i], parts[i][w]);
  }
  const float gate = engram_gate(sum[0], sum[1], sum[2], d, a.eps);
#pragma unroll
  for (int v = 0; v < Vectors; ++v) {
    const int64_t channel = (static_cast<int64_t>(v) * kThreads + threadIdx.x) * 4;
    if (channel >= d) continue;
    float add[4];
    load_values(value + channel, add);
#pragma unroll
    for (int e = 0; e < 4; ++e) held[v][e] = add_rn(held[v][e], mul_rn(gate, add[e]));
    store_values(x + channel, held[v]);
  }
}

bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace

cudaError_t engram_rows(const EngramRowsParams& a, cudaStream_t stream) {
  if (a.tokens < 0 || a.requests < 0 || a.orders < 1 || a.heads < 1) return cudaErrorInvalidValue;
  if (a.tokens == 0) return cudaSuccess;
  if (!a.mapped || !a.dead || !a.cu_seqlens || !a.multipliers || !a.primes || !a.offsets || !a.rows)
    return cudaErrorInvalidValue;
  if (a.requests > 0 && !a.history) return cudaErrorInvalidValue;
  if (a.tokens > INT32_MAX || a.orders * a.heads > INT32_MAX / kThreads) return cudaErrorInvalidValue;
  const int64_t blocks = (a.tokens * a.orders * a.heads + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  engram_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t engram_gather(const EngramGatherParams& a, int64_t blocks, cudaStream_t stream) {
  if (a.count < 0 || a.dim <= 0 || a.dim % 32 || a.table_rows < 0 || blocks < 0) return cudaErrorInvalidValue;
  if (a.count == 0) return cudaSuccess;
  const int64_t pieces = (a.dim + 127) / 128;
  if (a.count > INT32_MAX / pieces) return cudaErrorInvalidValue;
  if (!a.rows || !a.out || !aligned(a.out, 16)) return cudaErrorInvalidValue;
  if (a.table_rows > 0 && (!a.table || !a.scale || !aligned(a.table, 4))) return cudaErrorInvalidValue;
  const int64_t full = (a.count * pieces + kWarps * kPieces - 1) / (kWarps * kPieces);
  const int64_t grid = blocks == 0 || blocks > full ? full : blocks;
  engram_gather_kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(a, static_cast<uint32_t>(pieces));
  return cudaGetLastError();
}

cudaError_t engram_inject(const EngramInjectParams& a, cudaStream_t stream) {
  if (a.tokens < 0 || a.streams < 0 || a.channels <= 0 || a.channels % 16) return cudaErrorInvalidValue;
  if (a.channels > 8 * 4 * kThreads) return cudaErrorInvalidValue;
  if (a.tokens == 0 || a.streams == 0) return cudaSuccess;
  if (a.tokens > INT32_MAX / a.streams) return cudaErrorInvalidValue;
  if (!a.x || !a.kv || !a.qk_weight) return cudaErrorInvalidValue;
  if (!aligned(a.x, 16) || !aligned(a.kv, 16) || !aligned(a.qk_weight, 16)) return cudaErrorInvalidValue;
  const unsigned blocks = static_cast<unsigned>(a.tokens * a.streams);
  const int64_t vectors = (a.channels / 4 + kThreads - 1) / kThreads;
  if (vectors <= 2)
    engram_inject_kernel<2><<<blocks, kThreads, 0, stream>>>(a);
  else if (vectors <= 5)
    engram_inject_kernel<5><<<blocks, kThreads, 0, stream>>>(a);
  else
    engram_inject_kernel<8><<<blocks, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace mhc_engram::cuda
