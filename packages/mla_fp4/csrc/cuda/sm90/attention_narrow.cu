// Sparse attention of few heads a CTA: keys stand on the 64 rows that a product always has, heads on its 8, 16 or 32
// columns. The walk, the producer and every sum are those of attention_wide.cu, and a product's sums do not depend on
// which operand stands where (measured: equal to the bit), so a head's result is the same bits in both kernels. Rows of
// many heads are therefore cut into groups of heads when there are too few rows to fill the device.
//
//   own tile t      S^T = K_t Q^T                32 products 64 x N x 16
//                   P^T = e^(S^T - reference)    bfloat16, head by head, to shared memory
//   every tile      O^T = O^T f + V_t^T P^T      16 products 64 x N x 16 a warpgroup; V^T is the same tile read across
//
// Shared memory for N = 32, bytes: two tiles 131072, Q 32768, P 8192, staging 37120, control 10000.
#include "cuda/attention_narrow.hpp"

#include "cuda/sm90/attention_output.cuh"
#include "cuda/sm90/attention_producer.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::cuda {
namespace {

namespace wgmma = kernel_core::wgmma;
using wgmma::Major;

template <int N>
struct Config {
  static constexpr int kHeads = N, kConsumers = 256, kThreads = 768, kBlocks = 4;
  // 768 threads start with 80 each; 256 consumers, 512 producers
  static constexpr int kConsumerRegisters = 120, kProducerRegisters = 56;
  static constexpr int kOwn = N / 4;  // heads that a thread has sums of: 8 j + column and the next
  static constexpr uint32_t kHeadColumn = N * 128, kK = 0, kQ = 2 * kTileBytes, kP = kQ + 8 * kHeadColumn,
                            kStaging = kP + 2 * kHeadColumn,
                            kReferences = (kStaging + Producer<2>::kStagingBytes + 127) / 128 * 128,
                            kTops = kReferences + 2 * N * 4, kPairs = kTops + 2 * 4 * N * 4,
                            kDenominators = kPairs + 2 * 32 * N * 4, kMasks = kDenominators + 2 * N * 4,
                            kFull = kMasks + 2 * 8, kFree = kFull + 2 * 8, kWeightsFull = kFree + 2 * 8,
                            kBytes = kWeightsFull + 2 * 8;
  static_assert(kBytes <= 232448, "227 KiB");
  static constexpr int kConsumerBarrier = 1, kWarpgroupBarrier = 2;
  using Product = wgmma::Product<N>;
};

struct Items {
  uint32_t count, groups;                           // groups of heads a row
  __device__ __forceinline__ int at(int n) const {  // -1 after the last of this CTA
    const uint32_t i = blockIdx.x + static_cast<uint32_t>(n) * gridDim.x;
    return i < count ? static_cast<int>(i) : -1;
  }
};

template <typename C>
struct NarrowConsumer {
  static constexpr int kSums = C::kHeads / 2;  // accumulators of a product

  const AttentionParams& a;
  uint32_t shared;
  int warpgroup, thread, line, column;  // of this thread in an accumulator: a key or a column of the output, a head
  float scale;
  uint32_t done = 0;  // tiles since the kernel's start
  float o[C::kBlocks][kSums], reference[C::kOwn];
  float denominator, own_reference;  // of head `thread` and this warpgroup's tiles; in the first kHeads threads

  __device__ __forceinline__ NarrowConsumer(const AttentionParams& params, uint32_t base, int consumer)
      : a(params),
        shared(base),
        warpgroup(__shfl_sync(0xFFFFFFFF, consumer / 128, 0)),
        thread(consumer % 128),
        line(wgmma::accumulator_row(thread)),
        column(wgmma::accumulator_column(thread)) {
    scale = __fmul_rn(params.scale, kLog2E * kKeyFactor);
  }

  __device__ __forceinline__ void meet() const { ptx::named_barrier_sync(C::kConsumerBarrier, C::kConsumers); }
  __device__ __forceinline__ void meet_warpgroup() const {
    ptx::named_barrier_sync(C::kWarpgroupBarrier + warpgroup, 128);
  }
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();  // one lane speaks for what all have read
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + barrier);
  }

  // The head of entry n of what is kept for each head; which of them entry i of an accumulator belongs to.
  __device__ __forceinline__ int head_of(int n) const { return n / 2 * 8 + column + n % 2; }
  static __device__ __forceinline__ constexpr int own_of(int i) { return i / 4 * 2 + i % 2; }
  __device__ __forceinline__ uint32_t reference_address(uint32_t buffer, int head) const {
    return shared + C::kReferences + (buffer * C::kHeads + head) * 4;
  }

  __device__ __forceinline__ void fetch_q(int64_t row, int head0) const {
    const int heads = static_cast<int>(a.heads) - head0;
    const uint8_t* from = static_cast<const uint8_t*>(a.q) + (row * a.heads + head0) * (kDim * 2);
    const int first = warpgroup * 128 + thread;
#pragma unroll 4
    for (int i = 0; i < C::kHeads * 64 / C::kConsumers; ++i) {
      const int n = i * C::kConsumers + first, head = n / 64, unit = n % 64;
      const uint32_t to = unit / 8 * C::kHeadColumn + wgmma::swizzle128(head, unit % 8 * 16);
      ptx::cp_async_16(shared + C::kQ + to, from + (head < heads ? n * 16 : 0), head < heads);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void multiply_scores(float (&s)[kSums], uint32_t buffer, uint32_t turn) const {
    const uint64_t k = wgmma::k_major(shared + C::kK + buffer * kTileBytes), q = wgmma::k_major(shared + C::kQ);
    ptx::mbarrier_wait(shared + C::kFull + buffer * 8, turn);
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
  }

  __device__ __forceinline__ void multiply_values(uint32_t buffer) {
    const uint64_t p = wgmma::k_major(shared + C::kP + buffer * C::kHeadColumn);
    const uint64_t v =
        wgmma::mn_major(shared + C::kK + buffer * kTileBytes + warpgroup * (kTileBytes / 2), kColumnBytes);
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) wgmma::pin(o[b]);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kBlocks * 4; ++i) {
      const int block = i % C::kBlocks, step = i / C::kBlocks;
      C::Product::template ss<Major::k, Major::mn>(
          o[block], wgmma::advance(v, block * kColumnBytes + step * 2 * wgmma::kAtomBytes),
          wgmma::advance(p, step * 32), 1);
    }
    wgmma::commit();
    wgmma::wait<0>();
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) wgmma::pin(o[b]);
    arrive(C::kFree + buffer * 8);
  }

  __device__ __forceinline__ void scale_sums(const float (&f)[C::kOwn]) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) any |= f[n] != 1.0f;
    if (!__any_sync(0xFFFFFFFF, any)) return;  // times 1 changes nothing
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) o[b][i] = __fmul_rn(o[b][i], f[own_of(i)]);
    }
  }
  // The same for the denominator that this thread keeps.
  __device__ __forceinline__ void follow(float next) {
    denominator = __fmul_rn(denominator, rescale(own_reference, next));
    own_reference = next;
  }

  // O += P V of the other warpgroup's tile, once its weights are there.
  __device__ __forceinline__ void other_tile(uint32_t tile) {
    const uint32_t buffer = tile & 1;
    ptx::mbarrier_wait(shared + C::kWeightsFull + buffer * 8, tile >> 1 & 1);
    float f[C::kOwn];
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      const float next = ptx::load_shared_f32(reference_address(buffer, head_of(n)));
      f[n] = rescale(reference[n], next);
      reference[n] = next;
    }
    if (thread < C::kHeads) follow(ptx::load_shared_f32(reference_address(buffer, thread)));
    scale_sums(f);
    multiply_values(buffer);
  }

  __device__ __forceinline__ uint32_t top_address(int warp, int head) const {
    return shared + C::kTops + ((warpgroup * 4 + warp) * C::kHeads + head) * 4;
  }
  // Sums of two neighbouring keys: [group of eight keys][pair][head].
  __device__ __forceinline__ uint32_t pair_address(int group, int pair, int head) const {
    return shared + C::kPairs + ((warpgroup * 32 + group * 4 + pair) * C::kHeads + head) * 4;
  }

  // Scores to weights in shared memory. Sums of a head's weights run as in the wide kernel: neighbours first, then the
  // eight groups in order, then the four pairs.
  __device__ __forceinline__ void weigh(float (&s)[kSums], uint32_t buffer, float (&f)[C::kOwn]) {
    uint32_t mask;
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(mask)
                 : "r"(shared + C::kMasks + buffer * 8 + line / 32 * 4)
                 : "memory");
    const bool seen[2] = {(mask >> (line % 32) & 1) != 0, (mask >> (line % 32 + 8) & 1) != 0};
#pragma unroll
    for (int i = 0; i < kSums; ++i) s[i] = seen[i / 2 % 2] ? s[i] : minus_infinity();
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      float m = fmaxf(s[n / 2 * 4 + n % 2], s[n / 2 * 4 + n % 2 + 2]);
#pragma unroll
      for (int x = 4; x < 32; x *= 2) m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, x));
      if (thread % 32 < 4) ptx::store_shared_f32(top_address(thread / 32, head_of(n)), m);
    }
    meet_warpgroup();
    // The tile was decoded into its buffer, so the other has read what stands at its weights' place.
    const uint32_t tile = shared + C::kP + buffer * C::kHeadColumn;
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      float top = ptx::load_shared_f32(top_address(0, head_of(n)));
#pragma unroll
      for (int w = 1; w < 4; ++w) top = fmaxf(top, ptx::load_shared_f32(top_address(w, head_of(n))));
      const float next = next_reference(reference[n], __fmul_rn(top, scale));
      f[n] = rescale(reference[n], next);
      reference[n] = next;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x = weight(s[n / 2 * 4 + n % 2 + 2 * r], scale, next);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile + wgmma::swizzle128(head_of(n), (line + 8 * r) * 2)),
                     "h"(__bfloat16_as_ushort(__float2bfloat16_rn(x)))
                     : "memory");
        const float pair = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFF, x, 4));
        if (line % 2 == 0) ptx::store_shared_f32(pair_address(line / 8 + r, line % 8 / 2, head_of(n)), pair);
      }
      if (thread < 4) ptx::store_shared_f32(reference_address(buffer, head_of(n)), next);
    }
    ptx::fence_proxy_async();
    meet_warpgroup();
    arrive(C::kWeightsFull + buffer * 8);
    if (thread < C::kHeads) {
      follow(ptx::load_shared_f32(reference_address(buffer, thread)));
      float sums[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        sums[pair] = 0;
#pragma unroll
        for (int group = 0; group < 8; ++group) {
          sums[pair] = __fadd_rn(sums[pair], ptx::load_shared_f32(pair_address(group, pair, thread)));
        }
      }
      denominator = __fadd_rn(denominator, __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3])));
    }
  }

  __device__ __forceinline__ void own_tile(uint32_t tile, bool others_last) {
    asm volatile("" : "+r"(shared), "+r"(line), "+r"(column));  // addresses are cheaper than registers
    const uint32_t buffer = tile & 1, turn = tile >> 1 & 1;
    float s[kSums], f[C::kOwn];
    // Whichever can go first: waiting for this tile's keys while the other's weights are there would keep its buffer
    // from being filled again. No bit depends on it; the four warps have to agree.
    const bool ready = ptx::named_barrier_all(C::kWarpgroupBarrier + warpgroup, 128,
                                              ptx::mbarrier_test(shared + C::kFull + buffer * 8, turn));
    if (others_last && !ready) other_tile(tile - 1);
    multiply_scores(s, buffer, turn);
    if (others_last && ready) other_tile(tile - 1);
    weigh(s, buffer, f);
    scale_sums(f);
    multiply_values(buffer);
  }

  // Adjacent columns of the output are with lanes 4 apart: calls use(head, even column, its value, the odd one's) in
  // the lanes of the even ones.
  template <typename Use>
  __device__ __forceinline__ void pairs(const float (&sums)[kSums], int block, int heads, Use use) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFF, sums[i], 4);
      const int head = head_of(own_of(i));
      if (line % 2 == 0 && head < heads) {
        use(head, (warpgroup * C::kBlocks + block) * 64 + line + i / 2 % 2 * 8, sums[i], other);
      }
    }
  }

  __device__ __forceinline__ uint32_t denominator_address(int from, int head) const {
    return shared + C::kDenominators + (from * C::kHeads + head) * 4;
  }

  __device__ __forceinline__ void finish(int64_t row, int head0) {
    if (thread < C::kHeads) ptx::store_shared_f32(denominator_address(warpgroup, thread), denominator);
    meet();
    const int heads = static_cast<int>(a.heads) - head0;
    float factor[C::kOwn];
#pragma unroll
    for (int n = 0; n < C::kOwn; ++n) {
      const int head = head_of(n);
      const float sink = head < heads ? __ldg(a.sink + head0 + head) : 0.0f;
      const float both = __fadd_rn(ptx::load_shared_f32(denominator_address(0, head)),
                                   ptx::load_shared_f32(denominator_address(1, head)));
      factor[n] = __fmul_rn(finish_factor(reference[n], both, __fmul_rn(sink, kLog2E)), kKeyFactor);
    }
    uint32_t* out = static_cast<uint32_t*>(a.out) + (row * a.heads + head0) * (kDim / 2);
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
      const bool turned = b == C::kBlocks - 1 && warpgroup == 1;
#pragma unroll
      for (int i = 0; i < kSums; ++i) o[b][i] = __fmul_rn(o[b][i], factor[own_of(i)]);
      pairs(o[b], b, heads, [&](int head, int at, float even, float odd) {
        const int angle = turned ? (at - (kDim - kRopeDim)) / 2 : -1;
        out[(head * kDim + at) / 2] = output_pair(even, odd, a.rope + row * kRopeDim, angle);
      });
    }
  }

  __device__ __forceinline__ void run(Items items) {
    const int tiles = tile_count(a.selected);
    int item = items.at(0);
    fetch_q(item / items.groups, item % items.groups * C::kHeads);
#pragma unroll 1
    for (int n = 0; item >= 0; ++n) {
      const int next = items.at(n + 1);
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      meet();
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) o[b][i] = 0;
      }
#pragma unroll
      for (int i = 0; i < C::kOwn; ++i) reference[i] = minus_infinity();
      own_reference = minus_infinity();
      denominator = 0;
#pragma unroll 1
      for (int t = (done + warpgroup) & 1; t < tiles; t += 2) own_tile(done + t, t > 0);
      const uint32_t last = done + tiles - 1;
      if ((last & 1) != static_cast<uint32_t>(warpgroup)) other_tile(last);
      done += tiles;
      // Both warpgroups have all their scores: each has seen the other's last weights.
      if (next >= 0) fetch_q(next / items.groups, next % items.groups * C::kHeads);
      finish(item / items.groups, item % items.groups * C::kHeads);
      item = next;
    }
    ptx::cp_async_wait<0>();
  }
};

template <int N>
__global__ void __launch_bounds__(Config<N>::kThreads, 1)
    attention_narrow_kernel(const __grid_constant__ AttentionParams a, const Items items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Config<N>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t shared = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared + C::kFull + i * 8, 8);
      ptx::mbarrier_init(shared + C::kFree + i * 8, 8);
      ptx::mbarrier_init(shared + C::kWeightsFull + i * 8, 4);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  asm volatile("" : "+r"(shared));  // each role computes its own addresses
  if (thread >= C::kConsumers) {
    ptx::registers_shrink<C::kProducerRegisters>();
    const TileBuffers buffers = {shared + C::kK, shared + C::kStaging, shared + C::kMasks, shared + C::kFull,
                                 shared + C::kFree};
    Producer<2>(a, buffers, thread - C::kConsumers).run([&](int n) {
      const int item = items.at(n);
      return item < 0 ? item : item / static_cast<int>(items.groups);
    });
  } else {
    ptx::registers_grow<C::kConsumerRegisters>();
    NarrowConsumer<C>(a, shared, thread).run(items);
  }
#endif
}

template <int N>
cudaError_t launch(const AttentionParams& a, int64_t multiprocessors, cudaStream_t stream) {
  const uint32_t groups = static_cast<uint32_t>((a.heads + N - 1) / N);
  const Items items = {static_cast<uint32_t>(a.rows) * groups, groups};
  const cudaError_t error =
      cudaFuncSetAttribute(attention_narrow_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, Config<N>::kBytes);
  if (error != cudaSuccess) return error;
  const uint32_t blocks = items.count < multiprocessors ? items.count : static_cast<uint32_t>(multiprocessors);
  attention_narrow_kernel<N><<<blocks, Config<N>::kThreads, Config<N>::kBytes, stream>>>(a, items);
  return cudaGetLastError();
}

}  // namespace

cudaError_t attention_narrow(const AttentionParams& a, int64_t heads_of_cta, int64_t multiprocessors,
                             cudaStream_t stream) {
  if (!attention_fits(a)) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  if (heads_of_cta == 8) return launch<8>(a, multiprocessors, stream);
  if (heads_of_cta == 16) return launch<16>(a, multiprocessors, stream);
  if (heads_of_cta == 32) return launch<32>(a, multiprocessors, stream);
  return cudaErrorInvalidValue;
}

}  // namespace mla_fp4::cuda
