// The roles of the attention kernel that use tensor memory: products, weights, merge.
#pragma once

#include "cuda/sm100/attention_plan_sm100.cuh"
#include "cuda/sm100/device_sm100.cuh"
#include "cuda/sm90/unroll.cuh"

namespace mla_fp4::sm100 {

// One thread of a CTA, or of a pair. Scores first, then the four slices of O, each a fresh sum over the chunk's keys;
// a slice is given to the merge, and its columns to the decoder, as soon as it is done.
template <typename C>
struct Products {
  uint32_t shared, tmem;

  __device__ __forceinline__ void scores(int turn) const {
    constexpr int kProducts = C::kPair ? 1 : kTiles;  // of a pair's products one covers both tiles
    const uint64_t q = tcgen05::k_major(shared + C::kQ);
    MLA_FP4_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) wait<C::kCtas>(shared + C::kFull + tile * 8, turn & 1);
    tcgen05::fence_after();
    MLA_FP4_NO_UNROLL
    for (int tile = 0; tile < kProducts; ++tile) {
      const uint64_t k = tcgen05::k_major(shared + C::kK + tile * kTileBytes);
      const uint32_t to = tcgen05::tmem(tmem, half_lane(tile), C::kScoreColumns);
      MLA_FP4_UNROLL
      for (int step = 0; step < kDim / 16; ++step) {
        tcgen05::multiply_bf16<C::kCtas>(to, tcgen05::advance(q, score_step(step)),
                                         tcgen05::advance(k, score_step(step)), C::kScoreKind, step > 0);
      }
    }
    tcgen05::commit<C::kCtas>(shared + C::kScores);
  }

  __device__ __forceinline__ void slice(int s) const {
    constexpr int kProducts = C::kPair ? 1 : 2;
    MLA_FP4_UNROLL
    for (int half = 0; half < kProducts; ++half) {
      const uint32_t to = tcgen05::tmem(tmem, half_lane(half), C::kSlice + s % 2 * C::kSliceColumns);
      MLA_FP4_UNROLL
      for (int step = 0; step < kChunkKeys / 16; ++step) {
        tcgen05::multiply_bf16<C::kCtas>(to, tcgen05::k_major(shared + weight_step<C>(step)),
                                         tcgen05::mn_major(shared + value_step<C>(step, s, half), kColumnBytes),
                                         C::kValueKind, step > 0);
      }
    }
    tcgen05::commit<C::kCtas>(shared + C::kSliceFull + s % 2 * 8);
    tcgen05::commit<C::kCtas>(shared + C::kFree + s * 8);
  }

  __device__ __forceinline__ void run(int count) const {
    wait<C::kCtas>(shared + C::kQFull, 0);
    MLA_FP4_NO_UNROLL
    for (int turn = 0; turn < count; ++turn) {
      scores(turn);
      wait<C::kCtas>(shared + C::kWeights, turn & 1);
      tcgen05::fence_after();
      MLA_FP4_NO_UNROLL
      for (int s = 0; s < kSlices; ++s) {  // buffer s mod 2 has its second use of the chunk at s = 2, 3
        wait<C::kCtas>(shared + C::kSliceFree + s % 2 * 8, (s >> 1) ^ 1);
        tcgen05::fence_after();
        slice(s);
      }
    }
  }
};

// What the threads of the other two roles know of their place.
template <typename C>
struct Place {
  const AttentionParams& a;
  float* workspace;  // of attention_merge_sm100.cuh
  int64_t row;
  int head0, thread, chunks;  // thread of its warpgroup; chunks of the row
  uint32_t shared, tmem;

  __device__ __forceinline__ int head() const { return lane_head<C::kPair>(thread); }
  __device__ __forceinline__ int half() const { return lane_half<C::kPair>(thread); }
  // Whether there is such a head: a CTA has 64 of them, the last one of a row maybe fewer.
  __device__ __forceinline__ bool counts(int of_tile) const { return head0 + of_tile < a.heads; }
  __device__ __forceinline__ int64_t row_head() const { return row * a.heads + head0 + head(); }
  __device__ __forceinline__ uint32_t lane_base(uint32_t column) const {
    return tcgen05::tmem(tmem, thread / 32 * 32, column);
  }
  __device__ __forceinline__ uint32_t exchange(uint32_t area, int of_half) const {
    return shared + area + (of_half * C::kHeads + head()) * 4;
  }
  static __device__ __forceinline__ void put(uint32_t to, float v) {
    store_shared_4(to, kernel_core::cuda::float_bits(v));
  }
  static __device__ __forceinline__ float get(uint32_t from) {
    return kernel_core::cuda::bits_float(load_shared_4(from));
  }
  // Partial results of this head and a chunk
  __device__ __forceinline__ float* partial_sums(int chunk) const {
    return workspace + (row_head() * chunks + chunk) * kDim;
  }
  __device__ __forceinline__ float* partial_stats(int chunk) const {
    return workspace + (a.rows * a.heads * kDim + row_head() * 4) * chunks + chunk * 4;
  }
};

inline constexpr int kWeightsBarrier = 1, kFinishBarrier = 2;

// Warpgroup: scores of a chunk to weights. A thread has one head and 64 keys.
template <typename C, bool kSplit>
struct Weights : Place<C> {
  using P = Place<C>;

  __device__ __forceinline__ void scale_and_mask(float (&s)[64], int turn) const {
    uint32_t mask[2];
    wait<C::kCtas>(this->shared + C::kFull + this->half() * 8, turn & 1);  // over already; the mask came before it
    const uint32_t from = this->shared + C::mask(turn, this->half());
    mask[0] = load_shared_4(from), mask[1] = load_shared_4(from + 4);
    const float scale = mul_rn(this->a.scale, kLog2E);
    MLA_FP4_UNROLL
    for (int i = 0; i < 64; ++i) s[i] = mask[i / 32] >> (i % 32) & 1 ? mul_rn(s[i], scale) : minus_infinity();
  }

  __device__ __forceinline__ float chunk_top(const float (&s)[64]) const {
    float top = s[0];
    MLA_FP4_UNROLL
    for (int i = 1; i < 64; ++i) top = fmaxf(top, s[i]);
    P::put(P::exchange(C::kTops, this->half()), top);
    ptx::named_barrier_sync(kWeightsBarrier, 128);
    return fmaxf(top, P::get(P::exchange(C::kTops, 1 - this->half())));
  }

  __device__ __forceinline__ void store(const float (&w)[64]) const {
    const uint32_t row =
        this->shared + C::kP + this->half() * C::kPTile + this->head() * 128 + ((this->head() & 7) << 4);
    MLA_FP4_UNROLL
    for (int c = 0; c < 8; ++c) {
      uint32_t pairs[4];
      MLA_FP4_UNROLL
      for (int j = 0; j < 4; ++j) pairs[j] = pack_bf16(w[8 * c + 2 * j], w[8 * c + 2 * j + 1]);
      ptx::store_shared_16(row ^ static_cast<uint32_t>(c << 4), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  __device__ __forceinline__ void run(int first_chunk, int count) const {
    float running_top = minus_infinity(), running_sum = 0;
    MLA_FP4_NO_UNROLL
    for (int turn = 0; turn < count; ++turn) {
      wait<C::kCtas>(this->shared + C::kScores, turn & 1);
      tcgen05::fence_after();
      float s[64];
      float (&low)[32] = *reinterpret_cast<float (*)[32]>(&s[0]);
      float (&high)[32] = *reinterpret_cast<float (*)[32]>(&s[32]);
      tcgen05::load(low, P::lane_base(C::kScoreColumns));
      tcgen05::load(high, P::lane_base(C::kScoreColumns + 32));
      tcgen05::wait_load();
      tcgen05::pin(s);
      scale_and_mask(s, turn);
      const float top = chunk_top(s);
      MLA_FP4_UNROLL
      for (int i = 0; i < 64; ++i) s[i] = weight(s[i], top);
      const float sum = sum_weights(s);
      wait<C::kCtas>(this->shared + C::kFree + (kSlices - 1) * 8,
                     (turn & 1) ^ 1);  // the last chunk's weights were read
      store(s);
      fence_operands<C::kCtas>();
      tcgen05::fence_before();
      __syncwarp();
      if (this->thread % 32 == 0) arrive<C::kCtas>(this->shared + C::kWeights);
      if constexpr (kSplit) {
        if (P::counts(this->head())) {
          float* to = P::partial_stats(first_chunk + turn);
          to[1 + this->half()] = sum;
          if (this->half() == 0) to[0] = top;
        }
      } else {
        const Merge m = merge_factors(running_top, top);
        running_top = m.top;
        running_sum = merge_value(running_sum, sum, m);
      }
    }
    if constexpr (!kSplit) {  // the staging area is free: the last rows were decoded before the last scores
      P::put(P::exchange(C::kStaging, this->half()), running_sum);
      ptx::named_barrier_arrive(kFinishBarrier, 256);
    }
  }
};

// Warpgroup: a chunk's sums join the running ones, in tensor memory; at the end they go out. A thread has one head and
// half its columns.
template <typename C, bool kSplit>
struct Merging : Place<C> {
  using P = Place<C>;

  __device__ __forceinline__ void load_q() const {
    const uint8_t* from =
        static_cast<const uint8_t*>(this->a.q) + (this->row * this->a.heads + this->head0) * (kDim * 2);
    MLA_FP4_UNROLL
    for (int i = 0; i < C::kHeads * 64 / 128; ++i) {
      const int n = i * 128 + this->thread, head = n / 64, unit = n % 64;
      const uint32_t to = unit / 8 * kColumnBytes + head * 128 + ((unit ^ head) % 8 << 4);
      ptx::cp_async_16(this->shared + C::kQ + to, P::counts(head) ? from + n * 16 : from, P::counts(head));
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    fence_operands<C::kCtas>();
    __syncwarp();
    if (this->thread % 32 == 0) arrive<C::kCtas>(this->shared + C::kQFull);
  }

  __device__ __forceinline__ void take_slice(int s, int turn, int first_chunk, const Merge& m) const {
    wait<C::kCtas>(this->shared + C::kSliceFull + s % 2 * 8, s >> 1);
    tcgen05::fence_after();
    MLA_FP4_UNROLL
    for (int part = 0; part < 2; ++part) {
      const uint32_t sums = P::lane_base(C::kSums + s * C::kSliceColumns + part * 32);
      float v[32], old[32];
      tcgen05::load(v, P::lane_base(C::kSlice + s % 2 * C::kSliceColumns + part * 32));
      if (!kSplit && turn > 0) {
        tcgen05::load(old, sums);
      } else {
        MLA_FP4_UNROLL
        for (int i = 0; i < 32; ++i) old[i] = 0;
      }
      tcgen05::wait_load();
      tcgen05::pin(v);
      tcgen05::pin(old);
      if (part == 1) {
        tcgen05::fence_before();
        __syncwarp();
        if (this->thread % 32 == 0) arrive<C::kCtas>(this->shared + C::kSliceFree + s % 2 * 8);
      }
      if constexpr (kSplit) {
        float* to = P::partial_sums(first_chunk + turn) + output_column(this->half(), s, part * 32);
        if (P::counts(this->head())) {
          MLA_FP4_UNROLL
          for (int i = 0; i < 32; i += 4) {
            *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
          }
        }
      } else {
        MLA_FP4_UNROLL
        for (int i = 0; i < 32; ++i) v[i] = merge_value(old[i], v[i], m);
        tcgen05::store(sums, v);
      }
    }
  }

  __device__ __forceinline__ void finish(float top) const {
    ptx::named_barrier_sync(kFinishBarrier, 256);
    const float sum = add_rn(P::get(P::exchange(C::kStaging, 0)), P::get(P::exchange(C::kStaging, 1)));
    const bool counts = P::counts(this->head());
    const float sink = counts ? mul_rn(this->a.sink[this->head0 + this->head()], kLog2E) : 0.0f;
    const float factor = finish_factor(top, sum, sink);
    const float* rope = this->a.rope + this->row * kRopeDim;
    uint32_t* out = static_cast<uint32_t*>(this->a.out) + P::row_head() * (kDim / 2);
    MLA_FP4_NO_UNROLL
    for (int part = 0; part < 2 * kSlices; ++part) {
      float v[32];
      tcgen05::load(v, P::lane_base(C::kSums + part * 32));
      tcgen05::wait_load();
      tcgen05::pin(v);
      const int column = output_column(this->half(), part / 2, part % 2 * 32), turned = column - (kDim - kRopeDim);
      MLA_FP4_UNROLL
      for (int c = 0; c < 4; ++c) {
        uint32_t pairs[4];
        MLA_FP4_UNROLL
        for (int j = 0; j < 4; ++j) {
          const int i = 8 * c + 2 * j;
          float even = mul_rn(v[i], factor), odd = mul_rn(v[i + 1], factor);
          if (turned >= 0) turn_back(even, odd, rope[(turned + i) / 2], rope[kRopeDim / 2 + (turned + i) / 2]);
          pairs[j] = pack_bf16(even, odd);
        }
        if (counts) {
          *reinterpret_cast<uint4*>(out + column / 2 + 4 * c) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void run(int first_chunk, int count) const {
    load_q();
    float running_top = minus_infinity();
    MLA_FP4_NO_UNROLL
    for (int turn = 0; turn < count; ++turn) {
      wait<C::kCtas>(this->shared + C::kWeights, turn & 1);
      const float top = fmaxf(P::get(P::exchange(C::kTops, 0)), P::get(P::exchange(C::kTops, 1)));
      const Merge m = merge_factors(running_top, top);
      running_top = m.top;
      MLA_FP4_NO_UNROLL
      for (int s = 0; s < kSlices; ++s) take_slice(s, turn, first_chunk, m);
      if constexpr (!kSplit) tcgen05::wait_store();
    }
    if constexpr (!kSplit) finish(running_top);
  }
};

}  // namespace mla_fp4::sm100
