// Sparse attention of 64 heads a CTA: S = Q K^T, one softmax, O = P V with V = K (docs/model.md, Attention).
//
// A CTA takes a row, 64 heads and a run of 128-key chunks. Warpgroup 0 gathers and decodes (attention_gather.cuh). The
// consumers, warpgroups 1 and 2, split a chunk's scores by keys, 64 each, and its output by columns, 256 each:
//
//   S_w = Q K_w^T                 32 products 64 x 64 x 16
//   m = max over both S           through shared memory, 64 floats each
//   P_w = e^(S_w - m)             bfloat16, to shared memory, read by both
//   O[64 columns] = merge(O, P V)  four slices of 8 products 64 x 64 x 16, each a fresh sum over the whole chunk
//
// The sum of a chunk is finished before it joins the running one, so a chunk's contribution has the same bits whether
// one CTA walks all chunks or each has its own. A slice whose columns were read is given back at once: the producer
// fills the first tile of the next chunk while later slices are still being multiplied.
//
// Shared memory, bytes: Q 65536, two tiles 131072, P 16384, staging 18432, control 1024: 232448, all that a CTA can
// have. Registers: 384 threads start with 168 each (64512 in all); consumers take 216 (128 running sums, 32 of a slice
// or of scores), the producer keeps 72: 2 * 128 * 216 + 128 * 72 = 64512.
//
// Cycles of a chunk by count, not measured: twice 128 * 64 * 512 multiply-adds at 2048 a cycle = 4096, both
// operands from shared memory at its full rate (128 bytes a cycle); decoding 128 x 512 values at about 20 instructions
// for eight = 1280 issue slots of each scheduler, beside the products. One CTA a multiprocessor: the load of Q and the
// last store are not hidden.
#include "cuda/attention_wide.hpp"

#include "cuda/sm90/attention_gather.cuh"
#include "cuda/sm90/attention_merge.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::cuda {
namespace {

namespace wgmma = kernel_core::wgmma;
using wgmma::Major;

struct Config {
  static constexpr int kHeads = 64, kConsumers = 256, kThreads = 384;
  static constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
  static constexpr uint32_t kQ = 0, kK = kTileBytes, kP = kK + kTiles * kTileBytes, kPTile = kHeads * 128,
                            kStaging = kP + kTiles * kPTile, kControl = kStaging + kStagingBytes, kTops = kControl,
                            kMasks = kTops + 2 * kHeads * 4, kFull = kMasks + kTiles * 8, kFree = kFull + kTiles * 8,
                            kBytes = kControl + 1024;
  static constexpr int kConsumerBarrier = 1;
};
static_assert(Config::kBytes == 232448 && Config::kFree + kSlices * 8 <= Config::kBytes, "227 KiB");

using Scores = wgmma::Product<64>;

// What a consumer thread has of two rows of heads: `upper` its first, `lower` eight further down.
struct Running {
  float top[2], sum[2];
};

struct Consumer {
  const AttentionParams& a;
  int64_t row;
  int head0, warpgroup, thread;  // warpgroup 0 or 1
  uint32_t shared;
  int head_row, column;  // of this thread in an accumulator

  __device__ __forceinline__ Consumer(const AttentionParams& params, int64_t r, int h, int consumer, uint32_t base)
      : a(params),
        row(r),
        head0(h),
        warpgroup(__shfl_sync(0xFFFFFFFF, consumer / 128, 0)),
        thread(consumer % 128),
        shared(base),
        head_row(wgmma::accumulator_row(thread)),
        column(wgmma::accumulator_column(thread)) {}

  __device__ __forceinline__ void meet() const {
    ptx::named_barrier_sync(Config::kConsumerBarrier, Config::kConsumers);
  }

  __device__ __forceinline__ void load_q() const {
    const uint8_t* from = static_cast<const uint8_t*>(a.q) + (row * a.heads + head0) * (kDim * 2);
    const int first = warpgroup * 128 + thread;
#pragma unroll 4
    for (int i = 0; i < Config::kHeads * 64 / Config::kConsumers; ++i) {
      const int n = i * Config::kConsumers + first, head = n / 64, unit = n % 64;
      const uint32_t to = unit / 8 * kColumnBytes + wgmma::swizzle128(head, unit % 8 * 16);
      ptx::cp_async_16(shared + Config::kQ + to, from + n * 16);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    meet();
  }

  // Scores of this warpgroup's 64 keys, times scale and log2 e, -inf where there is no key.
  __device__ __forceinline__ void scores(float (&s)[32], int turn, float scale) const {
    ptx::mbarrier_wait(shared + Config::kFull + warpgroup * 8, turn & 1);
    const uint64_t q = wgmma::k_major(shared + Config::kQ);
    const uint64_t k = wgmma::k_major(shared + Config::kK + warpgroup * kTileBytes);
    wgmma::pin(s);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint32_t at = step / 4 * kColumnBytes + step % 4 * 32;
      Scores::ss<Major::k>(s, wgmma::advance(q, at), wgmma::advance(k, at), step > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(s);
    uint32_t mask[2];
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(mask[0]), "=r"(mask[1])
                 : "r"(shared + Config::kMasks + warpgroup * 8)
                 : "memory");
    mask[0] >>= column, mask[1] >>= column;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int key = i / 4 * 8 + i % 2;  // besides `column`
      s[i] = mask[key / 32] >> (key % 32) & 1 ? __fmul_rn(s[i], scale) : minus_infinity();
    }
  }

  // The chunk's maximum of both rows of heads, over both warpgroups' keys.
  __device__ __forceinline__ void chunk_top(const float (&s)[32], float (&top)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = minus_infinity();
#pragma unroll
      for (int j = 0; j < 8; ++j) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 2));
      top[r] = m;
      if (thread % 4 == 0) exchange(warpgroup, r, m);
    }
    meet();  // also: both have read the last chunk's P
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], exchanged(1 - warpgroup, r));
  }

  __device__ __forceinline__ uint32_t exchange_address(int from, int r) const {
    return shared + Config::kTops + (from * Config::kHeads + head_row + 8 * r) * 4;
  }
  __device__ __forceinline__ void exchange(int from, int r, float v) const {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(exchange_address(from, r)), "f"(v) : "memory");
  }
  __device__ __forceinline__ float exchanged(int from, int r) const {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(exchange_address(from, r)) : "memory");
    return v;
  }

  // Turns scores into weights in shared memory, and sums them for this warpgroup's keys.
  __device__ __forceinline__ void weights(float (&s)[32], const float (&top)[2], float (&sum)[2]) const {
    // piece 0 of the first row; the second row is an atom further, piece j an exclusive or
    const uint32_t own = shared + Config::kP + warpgroup * Config::kPTile + wgmma::swizzle128(head_row, 2 * column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = weight(s[4 * j + 2 * r], top[r]), y = weight(s[4 * j + 2 * r + 1], top[r]);
        total = __fadd_rn(total, __fadd_rn(x, y));
        asm volatile("st.shared.u32 [%0], %1;" ::"r"((own ^ static_cast<uint32_t>(j << 4)) + r * wgmma::kAtomBytes),
                     "r"(output_pair(x, y, nullptr, -1))
                     : "memory");
      }
      total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFF, total, 1));
      sum[r] = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFF, total, 2));
    }
    ptx::fence_proxy_async();
    meet();
  }

  // P V of a chunk for 64 of this warpgroup's columns.
  __device__ __forceinline__ void slice(float (&o)[32], int s) const {
    const int block = warpgroup * kSlices + s;
    const uint64_t p = wgmma::k_major(shared + Config::kP);
    const uint64_t v = wgmma::mn_major(shared + Config::kK + block * kColumnBytes, kColumnBytes);
    wgmma::pin(o);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kChunkKeys / 16; ++step) {
      const int tile = step / 4;
      Scores::ss<Major::mn>(o, wgmma::advance(p, tile * Config::kPTile + step % 4 * 32),
                            wgmma::advance(v, tile * kTileBytes + step % 4 * 2 * wgmma::kAtomBytes), step > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(o);
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + Config::kFree + s * 8);
  }

  // Column of accumulator pair j of slice s in a head.
  __device__ __forceinline__ int column_of(int s, int j) const {
    return (warpgroup * kSlices + s) * 64 + 8 * j + column;
  }

  __device__ __forceinline__ int64_t row_head(int r) const { return row * a.heads + head0 + head_row + 8 * r; }

  __device__ __forceinline__ void store_partial(const float (&o)[32], int s, int chunk, int chunks) const {
    const Partials parts(a, chunks);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* to = parts.sums + (row_head(r) * chunks + chunk) * kDim;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<float2*>(to + column_of(s, j)) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
    }
  }

  __device__ __forceinline__ void store_stats(const float (&top)[2], const float (&sum)[2], int chunk,
                                              int chunks) const {
    const Partials parts(a, chunks);
    if (thread % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* to = parts.stats + (row_head(r) * chunks + chunk) * 4;
      to[1 + warpgroup] = sum[r];
      if (warpgroup == 0) to[0] = top[r];
    }
  }

  __device__ __forceinline__ void finish(const float (&o)[kSlices][32], const Running& run) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (thread % 4 == 0) exchange(warpgroup, r, run.sum[r]);
    }
    meet();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sink = __fmul_rn(a.sink[head0 + head_row + 8 * r], kLog2E);
      const float factor = finish_factor(run.top[r], __fadd_rn(exchanged(0, r), exchanged(1, r)), sink);
      uint32_t* to = static_cast<uint32_t*>(a.out) + row_head(r) * (kDim / 2);
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int at = column_of(s, j);
          const int angle = s == kSlices - 1 && warpgroup == 1 ? (at - (kDim - kRopeDim)) / 2 : -1;
          to[at / 2] = output_pair(__fmul_rn(o[s][4 * j + 2 * r], factor), __fmul_rn(o[s][4 * j + 2 * r + 1], factor),
                                   a.rope + row * kRopeDim, angle);
        }
      }
    }
  }

  template <bool kSplit>
  __device__ __forceinline__ void run(int first_chunk, int count, int chunks) {
    const float scale = __fmul_rn(a.scale, kLog2E);
    load_q();
    float o[kSplit ? 1 : kSlices][32];
    Running running = {{minus_infinity(), minus_infinity()}, {0, 0}};
    if constexpr (!kSplit) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int i = 0; i < 32; ++i) o[s][i] = 0;
      }
    }
#pragma unroll 1
    for (int turn = 0; turn < count; ++turn) {
      // Else the compiler computes the addresses and descriptors of all products once and keeps them in registers.
      asm volatile("" : "+r"(shared), "+r"(head_row), "+r"(column));
      float s[32], top[2], sum[2];
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = 0;
      scores(s, turn, scale);
      chunk_top(s, top);
      weights(s, top, sum);
      ptx::mbarrier_wait(shared + Config::kFull + (1 - warpgroup) * 8, turn & 1);  // the other's keys are values too
      Merge m[2];
      if constexpr (kSplit) {
        store_stats(top, sum, first_chunk + turn, chunks);
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          m[r] = merge_factors(running.top[r], top[r]);
          running.top[r] = m[r].top;
          running.sum[r] = merge_value(running.sum[r], sum[r], m[r]);
        }
      }
#pragma unroll
      for (int n = 0; n < kSlices; ++n) {
        slice(s, n);
        if constexpr (kSplit) {
          store_partial(s, n, first_chunk + turn, chunks);
        } else {
#pragma unroll
          for (int i = 0; i < 32; ++i) o[n][i] = merge_value(o[n][i], s[i], m[i / 2 % 2]);
        }
      }
    }
    if constexpr (!kSplit) finish(o, running);
  }
};

template <bool kSplit>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_wide_kernel(const __grid_constant__ AttentionParams a, const int walk) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t tiles = static_cast<uint32_t>(a.heads) / Config::kHeads;
  const int chunks = static_cast<int>(attention_chunks(a.selected));
  const uint32_t groups = kSplit ? (chunks + walk - 1) / walk : 1;
  const int head0 = static_cast<int>(blockIdx.x % tiles) * Config::kHeads;
  const uint32_t item = blockIdx.x / tiles, row = item / groups;
  const int first = static_cast<int>(item % groups) * walk;
  const int count = chunks - first < walk ? chunks - first : walk;

  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();  // descriptors and swizzle need it
    for (int i = 0; i < kTiles; ++i) ptx::mbarrier_init(shared + Config::kFull + i * 8, 4);
    for (int i = 0; i < kSlices; ++i) ptx::mbarrier_init(shared + Config::kFree + i * 8, 8);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (thread < 128) {
    ptx::registers_shrink<Config::kProducerRegisters>();
    const TileBuffers buffers = {shared + Config::kK, shared + Config::kStaging, shared + Config::kMasks,
                                 shared + Config::kFull, shared + Config::kFree};
    Gather(a, row, buffers, first, count, thread).run();
  } else {
    ptx::registers_grow<Config::kConsumerRegisters>();
    Consumer(a, row, head0, thread - 128, shared).run<kSplit>(first, count, chunks);
  }
#endif
}

template <bool kSplit>
cudaError_t launch(const AttentionParams& a, int64_t walk, cudaStream_t stream) {
  const int64_t chunks = attention_chunks(a.selected), groups = kSplit ? (chunks + walk - 1) / walk : 1;
  const int64_t blocks = a.rows * groups * (a.heads / Config::kHeads);
  if (blocks >= int64_t{1} << 31) return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(attention_wide_kernel<kSplit>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes);
  if (error != cudaSuccess) return error;
  attention_wide_kernel<kSplit>
      <<<static_cast<unsigned>(blocks), Config::kThreads, Config::kBytes, stream>>>(a, static_cast<int>(walk));
  return cudaGetLastError();
}

}  // namespace

cudaError_t attention_wide(const AttentionParams& a, cudaStream_t stream) {
  if (!attention_fits(a) || a.heads % Config::kHeads != 0) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  if (!attention_is_split(a.selected, a.splits)) return launch<false>(a, attention_chunks(a.selected), stream);
  const cudaError_t error = launch<true>(a, a.splits, stream);
  return error == cudaSuccess ? launch_attention_merge(a, stream) : error;
}

}  // namespace mla_fp4::cuda
