// Window attention of consecutive rows, 64 heads a CTA: S = Q K^T, one softmax, O = P V with V = K (docs/model.md,
// Attention). What binds is memory: a row's queries and results are 128 KiB, its one new key 528 bytes.
//
// A CTA takes a run of rows of a request. Its keys are a ring of 144 bfloat16 rows in shared memory (window_plan.cuh),
// decoded once each. Two warpgroups take turns at the rows, each a whole row by itself: nothing passes between them,
// and while one multiplies or stores, the other's queries arrive.
//
//   S [64 x 144]  32 products 64 x 144 x 16, Q in registers out of shared memory: a slice is free once it was read
//   P             in registers, the sums of S are where its A operand needs them
//   O             four times 9 products 64 x 128 x 16; a quarter is stored while the next is multiplied
//
// Warps 0 and 1 copy queries, eight slices of 64 columns, each as soon as its place is free. Warp 2 decodes keys up to
// eight rows ahead.
//
// Shared memory, bytes: ring 147456, Q 65536, control 512. Registers: 2 * 128 * 232 + 128 * 40 = 384 * 168.
// Cycles of a row by count, not measured: products 2 * 64 * 144 * 512 / 2048 = 4608; memory 132 KiB at 18.5 bytes a
// cycle and multiprocessor = 7300.
#pragma once

#include "cuda/sm90/unroll.cuh"
#include "cuda/sm90/window_keys.cuh"
#include "cuda/sm90/window_plan.cuh"
#include "cuda/sm90/window_ptx.cuh"

namespace mla_fp4::cuda::window {

struct Config {
  static constexpr int kHeads = 64, kThreads = 384, kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr int kCopyThreads = 64, kKeyWarp = 2, kSliceCount = 8, kQuarters = 4;
  static constexpr uint32_t kRing = 0, kQ = kRingBytes, kControl = kQ + kQueryBytes;
  // kQFull: a barrier for each warpgroup and slice. A warpgroup sees every second row, and a barrier of both would be
  // two phases further when it looks again.
  static constexpr uint32_t kQFull = kControl, kQFree = kQFull + 2 * kSliceCount * 8, kReady = kQFree + kSliceCount * 8,
                            kDone = kReady + kAhead * 8, kWild = kDone + kAhead * 8, kBytes = kControl + 512;
  static constexpr int kStartBarrier = 1;
};
static_assert(Config::kWild + kSlots <= Config::kBytes && Config::kBytes <= 232448);
static_assert(kAhead % 2 == 0, "a ready barrier belongs to one warpgroup");

// --- queries --------------------------------------------------------------------------------------------------------

struct QueryCopy {
  const uint8_t* from;  // of this thread's 16 bytes of the next row
  int64_t row_bytes;
  uint32_t shared, to;

  __device__ __forceinline__ QueryCopy(const WindowParams& a, int64_t row, int head0, uint32_t base, int thread)
      : from(static_cast<const uint8_t*>(a.q) + (row * a.heads + head0 + thread / 8) * (kDim * 2) + thread % 8 * 16),
        row_bytes(a.heads * (kDim * 2)),
        shared(base),
        to(base + Config::kQ + wgmma::swizzle128(thread / 8, thread % 8 * 16)) {}

  __device__ __forceinline__ void row(int r) {
    MLA_FP4_NO_UNROLL
    for (int s = 0; s < Config::kSliceCount; ++s) {
      if (r > 0) ptx::mbarrier_wait(shared + Config::kQFree + s * 8, (r - 1) & 1);
      MLA_FP4_UNROLL
      for (int i = 0; i < Config::kHeads / 8; ++i) {
        ptx::cp_async_16(to + s * kSliceBytes + i * wgmma::kAtomBytes, from + s * 128 + i * 8 * (kDim * 2));
      }
      arrive_after_copies(shared + Config::kQFull + (r % 2 * Config::kSliceCount + s) * 8);
    }
    from += row_bytes;
  }
};

// --- products -------------------------------------------------------------------------------------------------------

struct Consumer {
  const WindowParams& a;
  uint32_t shared, fragments;
  int warpgroup, column;  // 0 or 1; of this thread in an accumulator
  int head0;              // first of this thread's two heads, the other is eight further
  bool first_lane;

  __device__ __forceinline__ Consumer(const WindowParams& params, int tile_head, int consumer, uint32_t base)
      : a(params),
        shared(base),
        warpgroup(__shfl_sync(0xFFFFFFFF, consumer / 128, 0)),
        column(wgmma::accumulator_column(consumer % 128)),
        first_lane(consumer % 32 == 0) {
    const int head = head_of(wgmma::accumulator_row(consumer % 128));
    fragments = shared + Config::kQ + fragment_source(head, column / 2, 0);
    head0 = tile_head + head;
  }

  __device__ __forceinline__ void scores(float (&s)[72], int r) const {
    const uint64_t k = wgmma::k_major(shared + Config::kRing);
    wgmma::pin(s);
    MLA_FP4_UNROLL
    for (int slice = 0; slice < Config::kSliceCount; ++slice) {
      ptx::mbarrier_wait(shared + Config::kQFull + (warpgroup * Config::kSliceCount + slice) * 8, r / 2 & 1);
      uint4 q[2][2];  // halves of the slice, heads
      MLA_FP4_UNROLL
      for (int g = 0; g < 2; ++g) {
        MLA_FP4_UNROLL
        for (int h = 0; h < 2; ++h) {
          q[g][h] = ptx::load_shared_16((fragments ^ g << 6) + slice * kSliceBytes + h * wgmma::kAtomBytes);
        }
      }
      wgmma::fence();
      MLA_FP4_UNROLL
      for (int g = 0; g < 2; ++g) {
        const uint32_t even[4] = {q[g][0].x, q[g][1].x, q[g][0].y, q[g][1].y};
        const uint32_t odd[4] = {q[g][0].z, q[g][1].z, q[g][0].w, q[g][1].w};
        product_144(s, even, wgmma::advance(k, slice * kKeyColumn + g * 64), slice + g > 0);
        product_144(s, odd, wgmma::advance(k, slice * kKeyColumn + g * 64 + 32), 1);
      }
      wgmma::commit();
      __syncwarp();  // the products have their operands, so the slice was read
      if (first_lane) ptx::mbarrier_arrive(shared + Config::kQFree + slice * 8);
      wgmma::wait<1>();  // the slice before: its registers are free
    }
    wgmma::wait<0>();
    wgmma::pin(s);
  }

  // Scores to weights as the A operands of nine steps of 16 keys. Returns what the sums are multiplied by.
  __device__ __forceinline__ void weights(float (&s)[72], uint32_t (&p)[9][4], float (&factor)[2], int own_slot,
                                          int seen) const {
    const int own = own_slot - column;
    const float scale = __fmul_rn(a.scale, kLog2E);
    MLA_FP4_UNROLL
    for (int i = 0; i < 72; ++i) {
      const int age = slot_age(own, i / 4 * 8 + i % 2);  // of slot 8 j + column + b
      s[i] = age < seen ? __fmul_rn(s[i], scale) : minus_infinity();
    }
    MLA_FP4_UNROLL
    for (int r = 0; r < 2; ++r) {
      float top = minus_infinity();
      MLA_FP4_UNROLL
      for (int j = 0; j < 18; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2));
      float total = 0;
      MLA_FP4_UNROLL
      for (int j = 0; j < 18; ++j) {
        const float x = weight(s[4 * j + 2 * r], top), y = weight(s[4 * j + 2 * r + 1], top);
        total = __fadd_rn(total, __fadd_rn(x, y));
        p[j / 2][j % 2 * 2 + r] = kernel_core::cuda::pack_bf16(x, y);
      }
      total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFF, total, 1));
      total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFF, total, 2));
      factor[r] = finish_factor(top, total, __fmul_rn(__ldg(a.sink + head0 + 8 * r), kLog2E));
    }
  }

  // Starts P V for 128 columns.
  __device__ __forceinline__ void values(float (&o)[64], const uint32_t (&p)[9][4], int quarter) const {
    const uint64_t v = wgmma::mn_major(shared + Config::kRing + quarter * 2 * kKeyColumn, kKeyColumn);
    wgmma::pin(o);
    wgmma::fence();
    MLA_FP4_UNROLL
    for (int step = 0; step < kSlots / 16; ++step) {
      product_128(o, p[step], wgmma::advance(v, step * 2 * wgmma::kAtomBytes), step > 0);
    }
    wgmma::commit();
  }

  // 32 columns are 16 bytes of a thread, which has columns 8 c to 8 c + 7.
  __device__ __forceinline__ void store(const float (&o)[64], const float (&factor)[2], int64_t row,
                                        int quarter) const {
    const int mine = column * 4;
    MLA_FP4_UNROLL
    for (int g = 0; g < 4; ++g) {
      const int turned = quarter * 128 + g * 32 - (kDim - kRopeDim);
      float cosines[4], sines[4];
      if (turned >= 0) {
        const float* rope = a.rope + row * kRopeDim + (turned + mine) / 2;
        const float4 c = __ldg(reinterpret_cast<const float4*>(rope));
        const float4 s = __ldg(reinterpret_cast<const float4*>(rope + kRopeDim / 2));
        cosines[0] = c.x, cosines[1] = c.y, cosines[2] = c.z, cosines[3] = c.w;
        sines[0] = s.x, sines[1] = s.y, sines[2] = s.z, sines[3] = s.w;
      }
      MLA_FP4_UNROLL
      for (int r = 0; r < 2; ++r) {
        uint32_t words[4];
        MLA_FP4_UNROLL
        for (int j = 0; j < 4; ++j) {
          // + 0: a sum of nothing but zeros has no sign, whatever the keys that were masked
          float even = __fmaf_rn(o[16 * g + 4 * j + 2 * r], factor[r], 0.0f);
          float odd = __fmaf_rn(o[16 * g + 4 * j + 2 * r + 1], factor[r], 0.0f);
          if (turned >= 0) {
            const float t = fma_rn(even, cosines[j], __fmul_rn(odd, sines[j]));
            odd = fma_rn(odd, cosines[j], -__fmul_rn(even, sines[j]));
            even = t;
          }
          words[j] = kernel_core::cuda::pack_bf16(even, odd);
        }
        uint16_t* to =
            static_cast<uint16_t*>(a.out) + (row * a.heads + head0 + 8 * r) * kDim + quarter * 128 + g * 32 + mine;
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  __device__ __forceinline__ void run(const RunKeys& keys, int rows) {
    MLA_FP4_NO_UNROLL
    for (int r = warpgroup; r < rows; r += 2) {
      // Else the compiler computes the descriptors of all products once and keeps them in registers.
      asm volatile("" : "+r"(shared), "+r"(fragments), "+r"(column), "+r"(head0));
      ptx::mbarrier_wait(shared + Config::kReady + r % kAhead * 8, r / kAhead & 1);
      uint32_t p[9][4];
      float factor[2];
      {
        float s[72];
        MLA_FP4_UNROLL
        for (int i = 0; i < 72; ++i) s[i] = 0;
        scores(s, r);
        const int slot = (keys.slot + r) % kSlots;
        weights(s, p, factor, slot, seen_ages(keys.known, r, static_cast<int>(a.window)));
      }
      float o[2][64];
      MLA_FP4_UNROLL
      for (int i = 0; i < 64; ++i) o[0][i] = o[1][i] = 0;
      values(o[0], p, 0);
      MLA_FP4_UNROLL
      for (int quarter = 0; quarter < Config::kQuarters; ++quarter) {
        if (quarter + 1 < Config::kQuarters) {
          values(o[(quarter + 1) % 2], p, quarter + 1);
          wgmma::wait<1>();
        } else {
          wgmma::wait<0>();
          if (first_lane) ptx::mbarrier_arrive(shared + Config::kDone + r % kAhead * 8);
        }
        wgmma::pin(o[quarter % 2]);
        store(o[quarter % 2], factor, keys.first_row + r, quarter);
      }
    }
  }
};

// The run of an item; every warp finds it by itself.
__device__ __forceinline__ Run find_run(const WindowParams& a, uint32_t item, int lane) {
  const uint32_t size = static_cast<uint32_t>(a.run_rows);
  uint32_t begun = 0;
  for (uint32_t b = lane; b < static_cast<uint32_t>(a.batch); b += 32) {
    begun += first_item(static_cast<uint32_t>(__ldg(a.cu_seqlens + b)), b, size) <= item;
  }
  const uint32_t b = __reduce_add_sync(0xFFFFFFFF, begun) - 1;  // the first request's number is 0
  const uint32_t first = static_cast<uint32_t>(__ldg(a.cu_seqlens + b));
  return run_at(b, first, static_cast<uint32_t>(__ldg(a.cu_seqlens + b + 1)) - first, item - first_item(first, b, size),
                size);
}

// A thread block; `shared` is the address of Config::kBytes.
__device__ __forceinline__ void prefill_block(const WindowParams& a, uint32_t shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);
  const uint32_t tiles = static_cast<uint32_t>(a.heads) / Config::kHeads;
  const int head0 = static_cast<int>(blockIdx.x % tiles) * Config::kHeads;
  const Run run = find_run(a, blockIdx.x / tiles, lane);
  if (run.rows == 0) return;

  if (thread == 0) {
    if (shared % 1024 != 0) ptx::fail();  // descriptors and swizzle need it
    for (int i = 0; i < 2 * Config::kSliceCount; ++i) {
      ptx::mbarrier_init(shared + Config::kQFull + i * 8, Config::kCopyThreads);
    }
    for (int i = 0; i < Config::kSliceCount; ++i) ptx::mbarrier_init(shared + Config::kQFree + i * 8, 4);
    for (int i = 0; i < kAhead; ++i) {
      ptx::mbarrier_init(shared + Config::kReady + i * 8, 1);
      ptx::mbarrier_init(shared + Config::kDone + i * 8, 4);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  const int64_t request_row = __ldg(a.cu_seqlens + run.request), start = __ldg(a.start_pos + run.request);
  const int64_t position = start + run.first - request_row, lower = __ldg(a.lower + run.request);
  const RunKeys keys = {known_positions(position, lower),
                        static_cast<int32_t>(kernel_core::cuda::ring_offset(position, kSlots)), run.first};
  const KeyBuffers buffers = {shared + Config::kRing, shared + Config::kWild, shared + Config::kReady,
                              shared + Config::kDone};
  const auto filled = [] { ptx::named_barrier_sync(Config::kStartBarrier, Config::kThreads); };
  if (thread < 128) {
    ptx::registers_shrink<Config::kProducerRegisters>();
    if (thread < Config::kCopyThreads) {
      QueryCopy copy(a, run.first, head0, shared, thread);
      copy.row(0);
      filled();
      MLA_FP4_NO_UNROLL
      for (int r = 1; r < run.rows; ++r) copy.row(r);
    } else {
      filled();
      if (warp == Config::kKeyWarp) add_keys(a, buffers, keys, run.rows, lane);
    }
  } else {
    ptx::registers_grow<Config::kConsumerRegisters>();
    const RowPlace place =
        row_place(run.first, request_row, start, lower, __ldg(a.ring_slot + run.request), a.window, a.ring_rows);
    fill_ring(a, buffers, keys, place, warp - 4, lane);
    filled();
    Consumer(a, head0, thread - 128, shared).run(keys, run.rows);
  }
}

}  // namespace mla_fp4::cuda::window
