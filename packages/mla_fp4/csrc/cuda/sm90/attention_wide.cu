// Sparse attention of 64 heads a CTA: S = Q K^T, one softmax, O = P V with V = K (docs/model.md, Attention).
//
// Warpgroups 2 and 3 fetch and decode (attention_producer.cuh). Warpgroups 0 and 1 consume: tile t's scores belong to
// warpgroup t mod 2, every warpgroup has 256 columns of the output.
//
//   own tile t      S = Q K_t^T             32 products 64 x 64 x 16
//                   P = e^(S - reference)   to registers for the own half, to shared memory for the other's
//   every tile      O = O f + P V_t         8 products 64 x 128 x 16
//
// A warpgroup's products with the other's last tile and for its own scores go to the tensor unit together. Products
// beside a softmax were slower: both want the registers' ports (docs/kernels/mla_fp4.md, What was tried).
//
// CTAs stay and take rows in turn; a row's queries are fetched while the last row is finished, and are brought near
// while it is worked on.
//
// Shared memory, bytes: Q 65536, two tiles 131072, P 16384, staging 18560, control 896: 232448, all that a CTA can
// have. Registers: 512 threads start with 128 each; consumers take 192 (128 sums, 32 scores, 16 weights), producers
// keep 64: 256 * 192 + 256 * 64 = 65536.
#include "cuda/attention_wide.hpp"

#include "cuda/sm90/attention_output.cuh"
#include "cuda/sm90/attention_producer.cuh"
#include "kernel_core/cuda/wgmma.cuh"

namespace mla_fp4::cuda {
namespace {

namespace wgmma = kernel_core::wgmma;
using wgmma::Major;

struct Config {
  static constexpr int kHeads = 64, kConsumers = 256, kThreads = 512;
  static constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;
  static constexpr uint32_t kQ = 0, kK = kTileBytes, kP = kK + 2 * kTileBytes, kPTile = kHeads * 128,
                            kStaging = kP + 2 * kPTile, kControl = kStaging + Producer<1>::kStagingBytes,
                            kReferences = kControl, kMasks = kReferences + 2 * kHeads * 4, kFull = kMasks + 2 * 8,
                            kFree = kFull + 2 * 8, kWeightsFull = kFree + 2 * 8, kBytes = kControl + 896;
  static constexpr int kConsumerBarrier = 1;
};
static_assert(Config::kBytes == 232448 && Config::kWeightsFull + 2 * 8 <= Config::kBytes, "227 KiB");

using Scores = wgmma::Product<64>;
using Values = wgmma::Product<128>;

struct Items {
  uint32_t count, tiles;                            // tiles of 64 heads a row
  __device__ __forceinline__ int at(int n) const {  // -1 after the last of this CTA
    const uint32_t i = blockIdx.x + static_cast<uint32_t>(n) * gridDim.x;
    return i < count ? static_cast<int>(i) : -1;
  }
};

struct Consumer {
  const AttentionParams& a;
  uint32_t shared;
  int warpgroup, thread;
  int head_row, column;  // of this thread in an accumulator
  float scale;
  uint32_t done = 0;                             // tiles since the kernel's start
  float o[2][64], reference[2], denominator[2];  // two halves of this warpgroup's columns

  __device__ __forceinline__ Consumer(const AttentionParams& params, uint32_t base, int consumer)
      : a(params),
        shared(base),
        warpgroup(__shfl_sync(0xFFFFFFFF, consumer / 128, 0)),
        thread(consumer % 128),
        head_row(wgmma::accumulator_row(thread)),
        column(wgmma::accumulator_column(thread)) {
    scale = __fmul_rn(params.scale, kLog2E * kKeyFactor);
  }

  __device__ __forceinline__ void meet() const {
    ptx::named_barrier_sync(Config::kConsumerBarrier, Config::kConsumers);
  }
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();  // one lane speaks for what all have read
    if (thread % 32 == 0) ptx::mbarrier_arrive(shared + barrier);
  }

  __device__ __forceinline__ void fetch_q(int item) const {
    const uint8_t* from = static_cast<const uint8_t*>(a.q) + static_cast<int64_t>(item) * (Config::kHeads * kDim * 2);
    const int first = warpgroup * 128 + thread;
#pragma unroll 4
    for (int i = 0; i < Config::kHeads * 64 / Config::kConsumers; ++i) {
      const int n = i * Config::kConsumers + first, head = n / 64, unit = n % 64;
      const uint32_t to = unit / 8 * kColumnBytes + wgmma::swizzle128(head, unit % 8 * 16);
      ptx::cp_async_16(shared + Config::kQ + to, from + n * 16);
    }
    ptx::cp_async_commit();
  }

  // --- products ---

  __device__ __forceinline__ void begin_scores(float (&s)[32], uint32_t buffer, uint32_t turn) const {
    const uint64_t q = wgmma::k_major(shared + Config::kQ);
    const uint64_t k = wgmma::k_major(shared + Config::kK + buffer * kTileBytes);
    ptx::mbarrier_wait(shared + Config::kFull + buffer * 8, turn);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint32_t at = step / 4 * kColumnBytes + step % 4 * 32;
      Scores::ss<Major::k>(s, wgmma::advance(q, at), wgmma::advance(k, at), step > 0);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ uint64_t values(uint32_t buffer) const {
    return wgmma::mn_major(shared + Config::kK + buffer * kTileBytes + warpgroup * (kTileBytes / 2), kColumnBytes);
  }

  static __device__ __forceinline__ uint64_t value_step(uint64_t v, int half, int step) {
    return wgmma::advance(v, half * 2 * kColumnBytes + step * 2 * wgmma::kAtomBytes);
  }
  __device__ __forceinline__ void pin_sums() {
    wgmma::pin(o[0]);
    wgmma::pin(o[1]);
  }

  __device__ __forceinline__ void scale_sums(float first, float second) {
    if (!__any_sync(0xFFFFFFFF, first != 1.0f || second != 1.0f)) return;  // times 1 changes nothing
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i / 64][i % 64] = __fmul_rn(o[i / 64][i % 64], i / 2 % 2 ? second : first);
    denominator[0] = __fmul_rn(denominator[0], first), denominator[1] = __fmul_rn(denominator[1], second);
  }

  // O += P V of the other warpgroup's tile, once its weights are there: begins, and ends.
  __device__ __forceinline__ void begin_other(uint32_t tile) {
    const uint32_t buffer = tile & 1;
    ptx::mbarrier_wait(shared + Config::kWeightsFull + buffer * 8, tile >> 1 & 1);
    float f[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = ptx::load_shared_f32(reference_address(buffer, r));
      f[r] = rescale(reference[r], next);
      reference[r] = next;
    }
    scale_sums(f[0], f[1]);
    const uint64_t p = wgmma::k_major(shared + Config::kP + buffer * Config::kPTile), v = values(buffer);
    pin_sums();
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4, step = i % 4;
      Values::ss<Major::mn>(o[half], wgmma::advance(p, step * 32), value_step(v, half, step), 1);
    }
    wgmma::commit();
  }
  __device__ __forceinline__ void end_product(uint32_t buffer) {
    wgmma::wait<0>();
    pin_sums();
    arrive(Config::kFree + buffer * 8);
  }

  __device__ __forceinline__ void multiply_own(const uint32_t (&p)[4][4], uint32_t buffer) {
    const uint64_t v = values(buffer);
    pin_sums();
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) Values::rs<Major::mn>(o[i / 4], p[i % 4], value_step(v, i / 4, i % 4), 1);
    wgmma::commit();
    end_product(buffer);
  }

  // --- softmax of an own tile ---

  __device__ __forceinline__ uint32_t reference_address(uint32_t buffer, int r) const {
    return shared + Config::kReferences + (buffer * Config::kHeads + head_row + 8 * r) * 4;
  }

  // Scores to weights in the layout of a product's first operand; the factors for sums so far.
  __device__ __forceinline__ void weigh(float (&s)[32], uint32_t buffer, uint32_t (&p)[4][4], float (&f)[2],
                                        float (&sum)[2]) {
    uint32_t mask[2];
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(mask[0]), "=r"(mask[1])
                 : "r"(shared + Config::kMasks + buffer * 8)
                 : "memory");
    if ((mask[0] & mask[1]) != 0xFFFFFFFF) {
      mask[0] >>= column, mask[1] >>= column;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int key = i / 4 * 8 + i % 2;  // besides `column`
        if (!(mask[key / 32] >> (key % 32) & 1)) s[i] = minus_infinity();
      }
    }
    float top[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < 32; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFF, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFF, top[r], 2));
      const float next = next_reference(reference[r], __fmul_rn(top[r], scale));
      f[r] = rescale(reference[r], next);
      reference[r] = next;
      float total = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = weight(s[4 * j + 2 * r], scale, next), y = weight(s[4 * j + 2 * r + 1], scale, next);
        total = __fadd_rn(total, __fadd_rn(x, y));
        p[j / 2][j % 2 * 2 + r] = pack_pair(x, y);
      }
      total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFF, total, 1));
      sum[r] = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFF, total, 2));
    }
  }

  // The tile was decoded into its buffer, so the other has read what stands at its weights' place.
  __device__ __forceinline__ void publish(const uint32_t (&p)[4][4], uint32_t buffer) const {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t tile = shared + Config::kP + buffer * Config::kPTile + row * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t piece = static_cast<uint32_t>(2 * step + lane / 16) ^ (lane & 7);
      ptx::stmatrix_x4(tile + piece * 16, p[step][0], p[step][1], p[step][2], p[step][3]);
    }
    if (thread % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) ptx::store_shared_f32(reference_address(buffer, r), reference[r]);
    }
    ptx::fence_proxy_async();
    arrive(Config::kWeightsFull + buffer * 8);
  }

  // --- a row ---

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i / 64][i % 64] = 0;
  }

  template <bool kFirst>
  __device__ __forceinline__ void own_tile(uint32_t tile) {
    asm volatile("" : "+r"(shared), "+r"(head_row), "+r"(column));  // addresses are cheaper than registers
    const uint32_t buffer = tile & 1;
    float s[32];
    if (!kFirst) begin_other(tile - 1);
    begin_scores(s, buffer, tile >> 1 & 1);
    if (!kFirst) {
      wgmma::wait<1>();
      arrive(Config::kFree + (buffer ^ 1) * 8);
    }
    wgmma::wait<0>();
    pin_sums();
    wgmma::pin(s);
    uint32_t p[4][4];
    float f[2], sum[2];
    weigh(s, buffer, p, f, sum);
    publish(p, buffer);
    scale_sums(f[0], f[1]);
    denominator[0] = __fadd_rn(denominator[0], sum[0]), denominator[1] = __fadd_rn(denominator[1], sum[1]);
    multiply_own(p, buffer);
  }

  // Lanes side by side swap halves of two neighbouring groups of eight columns: a lane then has four columns, and a
  // quad's stores fill 32 bytes.
  __device__ __forceinline__ void store_pair(uint2* to, int j, uint32_t even, uint32_t odd) const {
    const bool second = thread % 2 != 0;
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, second ? even : odd, 1);
    to[(j * 8 + second * 8 + column / 4 * 4) / 4] = second ? make_uint2(other, odd) : make_uint2(even, other);
  }

  __device__ __forceinline__ void finish(int item, int64_t row) {
    meet();  // the other has read the last references
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (thread % 4 == 0) ptx::store_shared_f32(reference_address(warpgroup, r), denominator[r]);
    }
    meet();
    const int heads = static_cast<int>(a.heads) / Config::kHeads;
    const int head0 = item % heads * Config::kHeads;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = head_row + 8 * r;
      const float sink = __fmul_rn(__ldg(a.sink + head0 + head), kLog2E);
      const float both =
          __fadd_rn(ptx::load_shared_f32(reference_address(0, r)), ptx::load_shared_f32(reference_address(1, r)));
      const float factor = __fmul_rn(finish_factor(reference[r], both, sink), kKeyFactor);
      uint2* to = reinterpret_cast<uint2*>(static_cast<uint8_t*>(a.out) +
                                           (static_cast<int64_t>(item) * Config::kHeads + head) * (kDim * 2) +
                                           warpgroup * kDim);
      const float* angles = a.rope + row * kRopeDim;
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        asm volatile("" : "+l"(angles) : : "memory");  // all angles and addresses at once would not fit in registers
        uint32_t pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * ((j + i) % 16) + 2 * r;
          const int angle = j >= 24 && warpgroup == 1 ? ((j + i - 24) * 8 + column) / 2 : -1;
          pair[i] = output_pair(__fmul_rn(o[j / 16][at], factor), __fmul_rn(o[j / 16][at + 1], factor), angles, angle);
        }
        store_pair(to, j, pair[0], pair[1]);
      }
    }
  }

  __device__ __forceinline__ void run(Items items) {
    const int tiles = tile_count(a.selected);
    int item = items.at(0);
    fetch_q(item);
#pragma unroll 1
    for (int n = 0; item >= 0; ++n) {
      const int next = items.at(n + 1);
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      meet();
      if (next >= 0 && warpgroup + thread == 0) {
        ptx::prefetch_l2(static_cast<const uint8_t*>(a.q) + static_cast<int64_t>(next) * kTileBytes, kTileBytes);
      }
      clear();
      reference[0] = reference[1] = minus_infinity();
      denominator[0] = denominator[1] = 0;
#pragma unroll 1
      for (int t = (done + warpgroup) & 1; t < tiles; t += 2) {
        if (t == 0) {
          own_tile<true>(done);
        } else {
          own_tile<false>(done + t);
        }
      }
      const uint32_t last = done + tiles - 1;
      if ((last & 1) != static_cast<uint32_t>(warpgroup)) {
        begin_other(last);
        end_product(last & 1);
      }
      done += tiles;
      if (next >= 0) fetch_q(next);  // both warpgroups have all their scores: each has seen the other's last weights
      finish(item, item / items.tiles);
      item = next;
    }
    ptx::cp_async_wait<0>();
  }
};

__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_wide_kernel(const __grid_constant__ AttentionParams a, const Items items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t shared = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();  // descriptors and swizzle need it
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared + Config::kFull + i * 8, 8);
      ptx::mbarrier_init(shared + Config::kFree + i * 8, 8);
      ptx::mbarrier_init(shared + Config::kWeightsFull + i * 8, 4);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  asm volatile("" : "+r"(shared));  // each role computes its own addresses
  if (thread >= Config::kConsumers) {
    ptx::registers_shrink<Config::kProducerRegisters>();
    const TileBuffers buffers = {shared + Config::kK, shared + Config::kStaging, shared + Config::kMasks,
                                 shared + Config::kFull, shared + Config::kFree};
    Producer<1>(a, buffers, thread - Config::kConsumers).run([&](int n) {
      const int item = items.at(n);
      return item < 0 ? item : item / static_cast<int>(items.tiles);
    });
  } else {
    ptx::registers_grow<Config::kConsumerRegisters>();
    Consumer(a, shared, thread).run(items);
  }
#endif
}

}  // namespace

cudaError_t attention_wide(const AttentionParams& a, int64_t multiprocessors, cudaStream_t stream) {
  if (!attention_fits(a) || a.heads % Config::kHeads != 0) return cudaErrorInvalidValue;
  if (a.rows == 0) return cudaSuccess;
  const uint32_t tiles = static_cast<uint32_t>(a.heads) / Config::kHeads;
  const Items items = {static_cast<uint32_t>(a.rows) * tiles, tiles};
  const cudaError_t error =
      cudaFuncSetAttribute(attention_wide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes);
  if (error != cudaSuccess) return error;
  const uint32_t blocks = items.count < multiprocessors ? items.count : static_cast<uint32_t>(multiprocessors);
  attention_wide_kernel<<<blocks, Config::kThreads, Config::kBytes, stream>>>(a, items);
  return cudaGetLastError();
}

}  // namespace mla_fp4::cuda
