// The roles of a product's kernel: copies, products, and what is done with the sums.
#pragma once

#include "cuda/sm100/expert_params_sm100.hpp"
#include "cuda/sm100/expert_plan_sm100.cuh"
#include "cuda/sm100/expert_ptx_sm100.cuh"
#include "cuda/sm90/expert_layout.cuh"

namespace mega_moe::sm100 {

// A number that walks over buffers, and the parity of the turn.
struct Ring {
  int at = 0;
  uint32_t parity = 0;
  KC_HD void next(int count) {
    if (++at == count) at = 0, parity ^= 1;
  }
};

// Prefix sums of tiles in shared memory at `to`. One warp.
template <int kTokens>
__device__ __forceinline__ void plan_tiles(uint32_t to, const int32_t* offsets, int experts, int lane) {
  const int each = (experts + 31) / 32, begin = min(lane * each, experts), end = min(begin + each, experts);
  const auto tiles = [&](int e) { return (offsets[e + 1] - offsets[e] + kTokens - 1) / kTokens; };
  int mine = 0;
  for (int e = begin; e < end; ++e) mine += tiles(e);
  int sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_sync(~0u, sum, lane < step ? lane : lane - step);
    if (lane >= step) sum += other;
  }
  int before = sum - mine;
  for (int e = begin; e < end; ++e) {
    store_shared_4(to + e * 4, static_cast<uint32_t>(before));
    before += tiles(e);
  }
  if (lane == 31) store_shared_4(to + experts * 4, static_cast<uint32_t>(sum));
}

// With the shared one, which is the last
__device__ __forceinline__ int experts(const ExpertsParams& p) { return p.experts + (p.shared13 != nullptr); }

struct TilesBefore {
  uint32_t from;
  __device__ __forceinline__ int operator()(int expert) const {
    return static_cast<int>(load_shared_4(from + expert * 4));
  }
};

// What all roles know. kSecond: the second product, else the first.
template <typename C, bool kSecond>
struct Place {
  const ExpertsParams& p;
  uint32_t shared, tmem;
  int rank, group, groups;  // CTA of the pair; this pair among all

  __device__ __forceinline__ TilesBefore tiles() const { return {shared + C::kPlan}; }
  __device__ __forceinline__ int blocks() const {
    return kSecond ? p.d / (256 * C::kCtas) : p.inter / (128 * C::kCtas);
  }
  __device__ __forceinline__ int steps() const { return (kSecond ? p.inter : p.d) / kStepColumns; }
  __device__ __forceinline__ int items() const { return tiles()(experts(p)) * blocks(); }
  __device__ __forceinline__ Work work(int item) const {
    return find_work(tiles(), p.offsets, experts(p), blocks(), C::kTokens, item);
  }
  __device__ __forceinline__ int own_block(const Work& w) const { return w.block * C::kCtas + rank; }
};

// One thread of each CTA.
template <typename C, bool kSecond>
struct Copies : Place<C, kSecond> {
  __device__ __forceinline__ void run(const CUtensorMap& weights, const CUtensorMap& shared_weights) const {
    const ExpertsParams& p = this->p;
    const int steps = this->steps(), items = this->items();
    const uint8_t* images = kSecond ? p.hidden : p.images;
    const uint8_t* scales = kSecond ? p.scale2 : p.scale13;
    Ring stage;
    MEGA_MOE_SM100_NO_UNROLL
    for (int item = this->group; item < items; item += this->groups) {
      const Work w = this->work(item);
      const int block = this->own_block(w), own = product_columns<C::kCtas>(w.rows) / C::kCtas;
      const bool routed = w.expert < p.experts;
      const int row0 = weight_row(kSecond, p.inter, p.d, routed ? w.expert : 0, block, 0);
      const int row1 = weight_row(kSecond, p.inter, p.d, routed ? w.expert : 0, block, 1);
      const int64_t blocks = static_cast<int64_t>(this->blocks()) * C::kCtas;
      const uint8_t* scale = scales + (w.expert * blocks + block) * steps * kWeightScales;
      const uint8_t* image = images + static_cast<int64_t>(w.tile) * steps * C::kImageTile;
      const uint32_t bytes = own * kStepColumns, counted = kProducts * (routed ? kCodesCounted : kWeightBytes);
      MEGA_MOE_SM100_NO_UNROLL
      for (int step = 0; step < steps; ++step, stage.next(C::kStages)) {
        const uint32_t full = this->shared + C::kFull + stage.at * 8;
        const uint32_t to = this->shared + C::kWeights + stage.at * kProducts * kWeightBytes;
        const uint32_t scales_to = this->shared + C::kScales + stage.at * C::kStepScales;
        wait<C::kCtas>(this->shared + C::kEmpty + stage.at * 8, stage.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, counted + kWeightScales + kScaleBytes + bytes);
        if (routed) {
          copy_codes(to, weights, step * kStepColumns, row0, full);
          copy_codes(to + kWeightBytes, weights, step * kStepColumns, row1, full);
        } else {
          copy_values(to, shared_weights, step * kStepColumns, row0, full);
          copy_values(to + kWeightBytes, shared_weights, step * kStepColumns, row1, full);
        }
        ptx::cp_async_bulk(scales_to, scale, kWeightScales, full);
        ptx::cp_async_bulk(scales_to + kWeightScales, image, kScaleBytes, full);
        ptx::cp_async_bulk(this->shared + C::kImages + stage.at * C::kImageBytes,
                           image + kScaleBytes + this->rank * bytes, bytes, full);
        scale += kWeightScales, image += C::kImageTile;
      }
    }
  }
};

// One thread of the first CTA issues for both; the other CTA's passes on that its operands are there.
template <typename C, bool kSecond>
struct Products : Place<C, kSecond> {
  __device__ __forceinline__ void pass_on() const {
    const int steps = this->steps(), items = this->items();
    Ring stage;
    MEGA_MOE_SM100_NO_UNROLL
    for (int item = this->group; item < items; item += this->groups) {
      MEGA_MOE_SM100_NO_UNROLL
      for (int step = 0; step < steps; ++step, stage.next(C::kStages)) {
        ptx::mbarrier_wait(this->shared + C::kFull + stage.at * 8, stage.parity);
        arrive_first<C::kCtas>(this->shared + C::kReady + stage.at * 8);
      }
    }
  }

  __device__ __forceinline__ void step(int stage, int buffer, Weight weight, int n, bool first) const {
    const uint32_t scales = this->shared + C::kScales + stage * C::kStepScales;
    MEGA_MOE_SM100_UNROLL
    for (int i = 0; i < kProducts; ++i) {
      copy_scales<C::kCtas>(this->tmem + C::weight_scales(stage, i), tcgen05::scale_source(scales + i * kScaleBytes));
    }
    copy_scales<C::kCtas>(this->tmem + C::image_scales(stage), tcgen05::scale_source(scales + kWeightScales));
    const uint64_t b = tcgen05::k_major(this->shared + C::kImages + stage * C::kImageBytes);
    MEGA_MOE_SM100_UNROLL
    for (int i = 0; i < kProducts; ++i) {
      const uint64_t a = tcgen05::k_major(this->shared + C::kWeights + (stage * kProducts + i) * kWeightBytes);
      MEGA_MOE_SM100_UNROLL
      for (int part = 0; part < kStepColumns / 32; ++part) {
        multiply_mx<C::kCtas>(this->tmem + C::sums(buffer, i), tcgen05::advance(a, part * 32),
                              tcgen05::advance(b, part * 32), mx_product(weight, kBlockRows * C::kCtas, n, part),
                              this->tmem + C::weight_scales(stage, i), this->tmem + C::image_scales(stage),
                              !first || part > 0);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int steps = this->steps(), items = this->items();
    Ring stage, buffer;
    MEGA_MOE_SM100_NO_UNROLL
    for (int item = this->group; item < items; item += this->groups, buffer.next(C::kBuffers)) {
      const Work w = this->work(item);
      const int n = product_columns<C::kCtas>(w.rows);
      const Weight weight = w.expert < this->p.experts ? Weight::e2m1 : Weight::e4m3;
      wait<C::kCtas>(this->shared + C::kSumsFree + buffer.at * 8, buffer.parity ^ 1);
      MEGA_MOE_SM100_NO_UNROLL
      for (int i = 0; i < steps; ++i, stage.next(C::kStages)) {
        ptx::mbarrier_wait(this->shared + C::kFull + stage.at * 8, stage.parity);
        if constexpr (C::kCtas == 2) wait<C::kCtas>(this->shared + C::kReady + stage.at * 8, stage.parity);
        tcgen05::fence_after();
        step(stage.at, buffer.at, weight, n, i == 0);
        tcgen05::commit<C::kCtas>(this->shared + C::kEmpty + stage.at * 8);
      }
      tcgen05::commit<C::kCtas>(this->shared + C::kSumsFull + buffer.at * 8);
    }
  }
};

// Four warps. A thread has one weight row of either product: the gate and the up value of a channel, or two channels of
// the output. A warp has the 32 channels of a scale.
template <typename C, bool kSecond>
struct Sums : Place<C, kSecond> {
  static constexpr int kAtOnce = 8;

  // Rows and gains of the tile, before its sums are there
  __device__ __forceinline__ void read_rows(const Work& w, int buffer, int thread) const {
    if (thread < w.rows) {
      const int row = this->p.rows[w.first + thread];
      const uint32_t at = (buffer * C::kTokens + thread) * 4;
      store_shared_4(this->shared + C::kRows + at, static_cast<uint32_t>(row));
      const float gain = kSecond || w.expert == this->p.experts ? 1.0f : this->p.weights[row];
      if (!kSecond) store_shared_4(this->shared + C::kGains + at, cuda::float_bits(gain));
    }
    ptx::named_barrier_sync(1, 128);
  }
  __device__ __forceinline__ uint32_t noted(uint32_t where, int buffer, int row) const {
    return load_shared_4(this->shared + where + (buffer * C::kTokens + row) * 4);
  }

  __device__ __forceinline__ void store_hidden(const Work& w, int buffer, int n, int thread,
                                               const float (&gate)[kAtOnce], const float (&up)[kAtOnce]) const {
    const int lane = thread % 32, warp = thread / 32;
    float h[kAtOnce];
    uint32_t top = 0;  // of row n + lane mod 8
    MEGA_MOE_SM100_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const float gain = n + i < w.rows ? cuda::bits_float(noted(C::kGains, buffer, n + i)) : 0.0f;
      h[i] = sm90::gated(gate[i], up[i], this->p.limit, gain);
      const uint32_t largest = warp_max(cuda::magnitude_bits(h[i]));
      if (lane % kAtOnce == i) top = largest;
    }
    const uint32_t byte = activation_scale(top);
    uint8_t* image =
        this->p.hidden +
        (static_cast<int64_t>(w.tile) * (this->p.inter / kStepColumns) + this->own_block(w)) * C::kImageTile;
    if (lane < kAtOnce && n + lane < w.rows) image[scale_place(n + lane, warp)] = static_cast<uint8_t>(byte);
    MEGA_MOE_SM100_UNROLL
    for (int i = 0; i < kAtOnce; i += 2) {
      const float low = cuda::mul_rn(h[i], inverse_scale(__shfl_sync(~0u, byte, i)));
      const float high = cuda::mul_rn(h[i + 1], inverse_scale(__shfl_sync(~0u, byte, i + 1)));
      const uint32_t codes = e4m3_pair(low, high);
      uint8_t* to = image + kScaleBytes;
      if (n + i < w.rows) to[swizzle128(n + i, thread)] = static_cast<uint8_t>(codes);
      if (n + i + 1 < w.rows) to[swizzle128(n + i + 1, thread)] = static_cast<uint8_t>(codes >> 8);
    }
  }

  __device__ __forceinline__ void store_parts(const Work& w, int buffer, int n, int thread, const float (&a)[kAtOnce],
                                              const float (&b)[kAtOnce]) const {
    float* to = this->p.parts + this->own_block(w) * 256 + thread;
    MEGA_MOE_SM100_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (n + i >= w.rows) continue;
      const int64_t at = static_cast<int64_t>(noted(C::kRows, buffer, n + i)) * this->p.d;
      to[at] = a[i];
      to[at + 128] = b[i];
    }
  }

  __device__ __forceinline__ void run(int thread) const {
    const int items = this->items();
    Ring buffer;
    MEGA_MOE_SM100_NO_UNROLL
    for (int item = this->group; item < items; item += this->groups, buffer.next(C::kBuffers)) {
      const Work w = this->work(item);
      read_rows(w, buffer.at, thread);
      wait<C::kCtas>(this->shared + C::kSumsFull + buffer.at * 8, buffer.parity);
      tcgen05::fence_after();
      const uint32_t from = tcgen05::tmem(this->tmem, thread / 32 * 32, C::sums(buffer.at, 0));
      MEGA_MOE_SM100_NO_UNROLL
      for (int n = 0; n < w.rows; n += kAtOnce) {
        float a[kAtOnce], b[kAtOnce];
        tcgen05::load(a, from + n);
        tcgen05::load(b, from + C::kTokens + n);
        tcgen05::wait_load();
        tcgen05::pin(a);
        tcgen05::pin(b);
        if (n + kAtOnce >= w.rows) {  // the last sums are in registers
          tcgen05::fence_before();
          __syncwarp();
          if (thread % 32 == 0) arrive_first<C::kCtas>(this->shared + C::kSumsFree + buffer.at * 8);
        }
        if constexpr (kSecond) {
          store_parts(w, buffer.at, n, thread, a, b);
        } else {
          store_hidden(w, buffer.at, n, thread, a, b);
        }
      }
    }
  }
};

}  // namespace mega_moe::sm100
