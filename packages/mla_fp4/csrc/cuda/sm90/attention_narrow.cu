// Sparse attention of few heads: keys stand on the 64 rows that a product always has, heads on its 8, 16 or 32 columns.
//
//   S_w^T = K_w Q^T               consumer w: its 64 keys, 32 products 64 x N x 16
//   m = max over all keys          lanes, then eight warps through shared memory
//   P_w^T = e^(S_w^T - m)          bfloat16, stored head by head, read by both
//   O^T[64 columns] = merge(O^T, V^T P^T)   four slices of 8 products; V^T is the same tile read across
//
// The walk, the producer, the barriers and the merge are those of attention_wide.cu, so all that is said there about
// chunks and bits holds here. A CTA takes all heads of a row; those that do not exist are zeros and are not stored.
//
// Shared memory for N = 32, bytes: two tiles 131072, Q 32768, P 8192, staging 18432, control 3072. Registers: 4 N / 2
// running sums and N / 2 of a slice; all warps keep the 168 that 384 threads start with.
#include "cuda/attention_narrow.hpp"

#include "cuda/sm90/attention_gather.cuh"
#include "cuda/sm90/attention_merge.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::cuda {
namespace {

namespace wgmma = kernel_core::wgmma;
using wgmma::Major;

template <int N>
struct Config {
  static constexpr int kHeads = N, kConsumers = 256, kThreads = 384, kWarps = kConsumers / 32;
  static constexpr int kOwn = N / 4;  // heads that a thread has sums of: 8 j + column and the next
  static constexpr uint32_t kHeadColumn = N * 128, kK = 0, kQ = kTiles * kTileBytes, kP = kQ + 8 * kHeadColumn,
                            kStaging = kP + kTiles * kHeadColumn, kControl = kStaging + kStagingBytes, kTops = kControl,
                            kSums = kTops + kWarps * N * 4, kMasks = kSums + kWarps * N * 4,
                            kFull = kMasks + kTiles * 8, kFree = kFull + kTiles * 8, kBytes = kControl + 3072;
  static_assert(kFree + kSlices * 8 <= kBytes && kBytes <= 232448, "227 KiB");
  static constexpr int kConsumerBarrier = 1;
  using Product = wgmma::Product<N>;
};

template <typename C>
struct NarrowConsumer {
  static constexpr int kSums = C::kHeads / 2;  // accumulators of a product

  const AttentionParams& a;
  int64_t row;
  int warpgroup, thread;
  uint32_t shared;
  int line, column;  // of this thread in an accumulator: a key or a column of the output, and a head

  __device__ __forceinline__ NarrowConsumer(const AttentionParams& params, int64_t r, int consumer, uint32_t base)
      : a(params),
        row(r),
        warpgroup(__shfl_sync(0xFFFFFFFF, consumer / 128, 0)),
        thread(consumer % 128),
        shared(base),
        line(wgmma::accumulator_row(thread)),
        column(wgmma::accumulator_column(thread)) {}

  __device__ __forceinline__ void meet() const { ptx::named_barrier_sync(C::kConsumerBarrier, C::kConsumers); }

  // The head of entry i of an accumulator, and of entry n of what is kept for each head.
  __device__ __forceinline__ int head_of(int n) const { return n / 2 * 8 + column + n % 2; }
  static __device__ __forceinline__ constexpr int own_of(int i) { return i / 4 * 2 + i % 2; }

  __device__ __forceinline__ void load_q() const {
    const uint8_t* from = static_cast<const uint8_t*>(a.q) + row * a.heads * (kDim * 2);
    const int first = warpgroup * 128 + thread, heads = static_cast<int>(a.heads);
#pragma unroll 4
    for (int i = 0; i < C::kHeads * 64 / C::kConsumers; ++i) {
      const int n = i * C::kConsumers + first, head = n / 64, unit = n % 64;
      const uint32_t to = unit / 8 * C::kHeadColumn + wgmma::swizzle128(head, unit % 8 * 16);
      ptx::cp_async_16(shared + C::kQ + to, from + (head < heads ? n * 16 : 0), head < heads);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    meet();
  }

  __device__ __forceinline__ void scores(float (&s)[kSums], int turn, float scale) const {
    ptx::mbarrier_wait(shared + C::kFull + warpgroup * 8, turn & 1);
    const uint64_t k = wgmma::k_major(shared + C::kK + warpgroup * kTileBytes);
    const uint64_t q = wgmma::k_major(shared + C::kQ);
    wgmma::pin(s);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint32_t inside = step % 4 * 32;
      C::Product::template ss<Major::k>(s, wgmma::advance(k, step / 4 * kColumnBytes + inside),
                                        wgmma::advance(q, step / 4 * C::kHeadColumn + inside), step > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(s);
    uint32_t mask;
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(mask)
                 : "r"(shared + C::kMasks + warpgroup * 8 + line / 32 * 4)
                 : "memory");
    const bool seen[2] = {(mask >> (line % 32) & 1) != 0, (mask >> (line % 32 + 8) & 1) != 0};
#pragma unroll
    for (int i = 0; i < kSums; ++i) s[i] = seen[i / 2 % 2] ? __fmul_rn(s[i], scale) : minus_infinity();
  }

  // One number a warp and head through shared memory; whoever reads must have met the others in between.
  __device__ __forceinline__ uint32_t slot(uint32_t area, int warp, int head) const {
    return shared + area + (warp * C::kHeads + head) * 4;
  }
  __device__ __forceinline__ void give(uint32_t area, int n, float v) const {
    if (thread % 32 < 4) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(slot(area, warpgroup * 4 + thread / 32, head_of(n))), "f"(v)
                   : "memory");
    }
  }
  __device__ __forceinline__ float take(uint32_t area, int warp, int n) const {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(slot(area, warp, head_of(n))) : "memory");
    return v;
  }

  __device__ __forceinline__ void chunk_top(const float (&s)[kSums], float (&top)[C::kOwn]) const {
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      float m = fmaxf(s[n / 2 * 4 + n % 2], s[n / 2 * 4 + n % 2 + 2]);
#pragma unroll
      for (int x = 4; x < 32; x *= 2) m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, x));
      give(C::kTops, n, m);
    }
    meet();  // also: both have read the last chunk's P
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      top[n] = take(C::kTops, 0, n);
#pragma unroll
      for (int w = 1; w < C::kWarps; ++w) top[n] = fmaxf(top[n], take(C::kTops, w, n));
    }
  }

  // Weights to shared memory; the sums of each consumer's 64 keys, added in the same order everywhere.
  __device__ __forceinline__ void weights(const float (&s)[kSums], const float (&top)[C::kOwn], float (&left)[C::kOwn],
                                          float (&right)[C::kOwn]) const {
    const uint32_t tile = shared + C::kP + warpgroup * C::kHeadColumn;
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      float pair[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        pair[r] = weight(s[n / 2 * 4 + n % 2 + 2 * r], top[n]);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile + wgmma::swizzle128(head_of(n), (line + 8 * r) * 2)),
                     "h"(__bfloat16_as_ushort(__float2bfloat16_rn(pair[r])))
                     : "memory");
      }
      float sum = __fadd_rn(pair[0], pair[1]);
#pragma unroll
      for (int x = 4; x < 32; x *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFF, sum, x));
      give(C::kSums, n, sum);
    }
    ptx::fence_proxy_async();
    meet();
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      float half[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        half[w] = __fadd_rn(__fadd_rn(take(C::kSums, 4 * w, n), take(C::kSums, 4 * w + 1, n)),
                            __fadd_rn(take(C::kSums, 4 * w + 2, n), take(C::kSums, 4 * w + 3, n)));
      }
      left[n] = half[0], right[n] = half[1];
    }
  }

  __device__ __forceinline__ void slice(float (&o)[kSums], int s) const {
    const uint64_t v = wgmma::mn_major(shared + C::kK + (warpgroup * kSlices + s) * kColumnBytes, kColumnBytes);
    const uint64_t p = wgmma::k_major(shared + C::kP);
    wgmma::pin(o);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kChunkKeys / 16; ++step) {
      const int tile = step / 4;
      C::Product::template ss<Major::k, Major::mn>(
          o, wgmma::advance(v, tile * kTileBytes + step % 4 * 2 * wgmma::kAtomBytes),
          wgmma::advance(p, tile * C::kHeadColumn + step % 4 * 32), step > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(o);
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + C::kFree + s * 8);
  }

  // Adjacent columns of the output are with lanes 4 apart: calls use(head, even column, its value, the odd one's) in
  // the lanes of the even ones.
  template <typename Use>
  __device__ __forceinline__ void pairs(const float (&o)[kSums], int s, Use use) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFF, o[i], 4);
      const int head = head_of(own_of(i));
      if (line % 2 == 0 && head < a.heads) {
        use(head, (warpgroup * kSlices + s) * 64 + line + i / 2 % 2 * 8, o[i], other);
      }
    }
  }

  __device__ __forceinline__ void store_partial(const float (&o)[kSums], int s, int chunk, int chunks) const {
    const Partials parts(a, chunks);
    pairs(o, s, [&](int head, int at, float even, float odd) {
      float* to = parts.sums + ((row * a.heads + head) * chunks + chunk) * kDim + at;
      *reinterpret_cast<float2*>(to) = make_float2(even, odd);
    });
  }

  __device__ __forceinline__ void store_stats(const float (&top)[C::kOwn], const float (&left)[C::kOwn],
                                              const float (&right)[C::kOwn], int chunk, int chunks) const {
    if (warpgroup != 0 || thread >= 4) return;
    const Partials parts(a, chunks);
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      if (head_of(n) >= a.heads) continue;
      float* to = parts.stats + ((row * a.heads + head_of(n)) * chunks + chunk) * 4;
      *reinterpret_cast<float4*>(to) = make_float4(top[n], left[n], right[n], 0.0f);
    }
  }

  template <bool kSplit>
  __device__ __forceinline__ void run(int first_chunk, int count, int chunks) {
    const float scale = __fmul_rn(a.scale, kLog2E);
    load_q();
    float o[kSplit ? 1 : kSlices][kSums], top[C::kOwn], left[C::kOwn], right[C::kOwn];
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) top[n] = minus_infinity(), left[n] = right[n] = 0;
#pragma unroll
    for (int s = 0; s < (kSplit ? 1 : kSlices); ++s) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) o[s][i] = 0;
    }
#pragma unroll 1
    for (int turn = 0; turn < count; ++turn) {
      asm volatile("" : "+r"(shared), "+r"(line), "+r"(column));  // as in attention_wide.cu
      float s[kSums], new_top[C::kOwn], new_left[C::kOwn], new_right[C::kOwn];
#pragma unroll
      for (int i = 0; i < kSums; ++i) s[i] = 0;
      scores(s, turn, scale);
      chunk_top(s, new_top);
      weights(s, new_top, new_left, new_right);
      ptx::mbarrier_wait(shared + C::kFull + (1 - warpgroup) * 8, turn & 1);  // the other's keys are values too
      Merge m[C::kOwn];
      if constexpr (kSplit) {
        store_stats(new_top, new_left, new_right, first_chunk + turn, chunks);
      } else {
#pragma unroll
        for (int n = 0; n < C::kOwn; ++n) {
          m[n] = merge_factors(top[n], new_top[n]);
          top[n] = m[n].top;
          left[n] = merge_value(left[n], new_left[n], m[n]), right[n] = merge_value(right[n], new_right[n], m[n]);
        }
      }
#pragma unroll
      for (int n = 0; n < kSlices; ++n) {
        slice(s, n);
        if constexpr (kSplit) {
          store_partial(s, n, first_chunk + turn, chunks);
        } else {
#pragma unroll
          for (int i = 0; i < kSums; ++i) o[n][i] = merge_value(o[n][i], s[i], m[own_of(i)]);
        }
      }
    }
    if constexpr (!kSplit) {
      float factor[C::kOwn];
#pragma unroll
      for (int n = 0; n < C::kOwn; ++n) {
        const float sink = head_of(n) < a.heads ? a.sink[head_of(n)] : 0.0f;
        factor[n] = finish_factor(top[n], __fadd_rn(left[n], right[n]), __fmul_rn(sink, kLog2E));
      }
      uint32_t* out = static_cast<uint32_t*>(a.out) + row * a.heads * (kDim / 2);
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        const bool turned = s == kSlices - 1 && warpgroup == 1;
#pragma unroll
        for (int i = 0; i < kSums; ++i) o[s][i] = __fmul_rn(o[s][i], factor[own_of(i)]);
        pairs(o[s], s, [&](int head, int at, float even, float odd) {
          const int angle = turned ? (at - (kDim - kRopeDim)) / 2 : -1;
          out[(head * kDim + at) / 2] = output_pair(even, odd, a.rope + row * kRopeDim, angle);
        });
      }
    }
  }
};

template <int N, bool kSplit>
__global__ void __launch_bounds__(Config<N>::kThreads, 1)
    attention_narrow_kernel(const __grid_constant__ AttentionParams a, const int walk) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Config<N>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x), chunks = static_cast<int>(attention_chunks(a.selected));
  const uint32_t groups = kSplit ? (chunks + walk - 1) / walk : 1, row = blockIdx.x / groups;
  const int first = static_cast<int>(blockIdx.x % groups) * walk;
  const int count = chunks - first < walk ? chunks - first : walk;

  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();
    for (int i = 0; i < kTiles; ++i) ptx::mbarrier_init(shared + C::kFull + i * 8, 4);
    for (int i = 0; i < kSlices; ++i) ptx::mbarrier_init(shared + C::kFree + i * 8, 8);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (thread < 128) {
    const TileBuffers buffers = {shared + C::kK, shared + C::kStaging, shared + C::kMasks, shared + C::kFull,
                                 shared + C::kFree};
    Gather(a, row, buffers, first, count, thread).run();
  } else {
    NarrowConsumer<C>(a, row, thread - 128, shared).template run<kSplit>(first, count, chunks);
  }
#endif
}

template <int N, bool kSplit>
cudaError_t launch(const AttentionParams& a, int64_t walk, cudaStream_t stream) {
  const int64_t chunks = attention_chunks(a.selected), blocks = a.rows * (kSplit ? (chunks + walk - 1) / walk : 1);
  if (blocks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const cudaError_t error = cudaFuncSetAttribute(attention_narrow_kernel<N, kSplit>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, Config<N>::kBytes);
  if (error != cudaSuccess) return error;
  attention_narrow_kernel<N, kSplit>
      <<<static_cast<unsigned>(blocks), Config<N>::kThreads, Config<N>::kBytes, stream>>>(a, static_cast<int>(walk));
  return cudaGetLastError();
}

template <int N>
cudaError_t launch(const AttentionParams& a, cudaStream_t stream) {
  if (!attention_is_split(a.selected, a.splits)) return launch<N, false>(a, attention_chunks(a.selected), stream);
  const cudaError_t error = launch<N, true>(a, a.splits, stream);
  return error == cudaSuccess ? launch_attention_merge(a, stream) : error;
}

}  // namespace

cudaError_t attention_narrow(const AttentionParams& a, cudaStream_t stream) {
  if (!attention_fits(a) || a.heads > 32) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  return a.heads <= 8 ? launch<8>(a, stream) : a.heads <= 16 ? launch<16>(a, stream) : launch<32>(a, stream);
}

}  // namespace mla_fp4::cuda
