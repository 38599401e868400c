// The two warpgroups that multiply: 64 tokens by 256 weight rows each. In E4M3 sums leave the tensor unit every 128
// columns.
//
// Tokens are rows of the product, so that a token's scale is one register. While one warpgroup scales and adds, the
// other has the tensor unit.
#pragma once

#include "expert_prefill_producer.cuh"

namespace mega_moe::sm90 {

template <typename C, bool kFirst>
class PrefillConsumer {
 public:
  __device__ PrefillConsumer(const PrefillParams& p, const PrefillProduct& product, PrefillShared<C>& shared)
      : p_(p),
        product_(product),
        s_(shared),
        lane_(static_cast<int>(threadIdx.x % 32)),
        group_(uniform(static_cast<int>(threadIdx.x / 128))),
        row_(kernel_core::wgmma::accumulator_row(static_cast<int>(threadIdx.x % 128))) {}

  __device__ void run() {
    for (int i = 0; i < 64; ++i) sums_[i] = 0;
    fall_behind();
    MEGA_MOE_NO_UNROLL
    for (int number = static_cast<int>(blockIdx.x);; number += static_cast<int>(gridDim.x)) {
      const PrefillTile tile = uniform_tile<C>(s_.plan, number, product_.groups);
      if (tile.expert < 0) return;
      const int block = C::kBlocks == 2 ? group_ : 0, group = C::kGroups == 2 ? group_ : 0;
      if (block < tile.blocks && group < tile.groups) {
        if constexpr (C::kFp8)
          multiply(block, group);
        else
          multiply_bf16(block, group);
        finish(tile.expert, tile.block + block, tile.group + group);
      } else {
        pass();
      }
    }
  }

 private:
  __device__ void fall_behind() const {
    if (group_ == 0 || p_.lag == 0 || p_.lag >= product_.steps) return;
    if (uniform_tile<C>(s_.plan, static_cast<int>(blockIdx.x), product_.groups).expert < 0) return;
    kernel_core::ptx::mbarrier_wait(full_barrier<C>(p_.lag), 0);
  }

  static constexpr uint64_t kColumnMajor = kernel_core::wgmma::k_major(0);

  __device__ void release(int stage) {
    __syncwarp();
    if (lane_ == 0) kernel_core::ptx::mbarrier_arrive(empty_barrier<C>(stage));
  }

  // A tile in which this warpgroup has nothing.
  __device__ void pass() {
    namespace ptx = kernel_core::ptx;
    MEGA_MOE_NO_UNROLL
    for (int step = 0; step < product_.steps; ++step, stage_.next()) {
      ptx::mbarrier_wait(full_barrier<C>(stage_.at), stage_.parity);
      release(stage_.at);
    }
  }

  __device__ void multiply(int block, int group) {
    namespace ptx = kernel_core::ptx;
    namespace wgmma = kernel_core::wgmma;
    const uint32_t image = kFirstShared + C::kImagesAt + block * C::kImageBytes;
    const uint32_t weights = kFirstShared + group * C::kGroupBytes;
    const uint32_t scales = image + kChunkCodes + row_ * 4;
    MEGA_MOE_UNROLL
    for (int i = 0; i < 128; ++i) d_[i] = 0;
    MEGA_MOE_NO_UNROLL
    for (int step = 0; step < product_.steps; ++step) {
      const uint32_t offset = stage_.at * C::kStageBytes;
      const uint64_t a = kColumnMajor | (image + offset) >> 4, b = kColumnMajor | (weights + offset) >> 4;
      ptx::mbarrier_wait(full_barrier<C>(stage_.at), stage_.parity);
      const float scale = ptx::load_shared_f32(scales + offset), scale8 = ptx::load_shared_f32(scales + offset + 32);
      MEGA_MOE_UNROLL
      for (int half = 0; half < 2; ++half) {
        wgmma::fence();
        MEGA_MOE_UNROLL
        for (int k = 0; k < 4; ++k)
          product_e4m3_shared(sums_, wgmma::advance(a, k * 32), wgmma::advance(b, half * kExpandedStep + k * 32),
                              k > 0);
        wgmma::commit();
        wgmma::wait<0>();
        wgmma::pin(sums_);
        if (half == 1) release(stage_.at);
        MEGA_MOE_UNROLL
        for (int i = 0; i < 64; ++i) d_[half * 64 + i] = fused(sums_[i], i % 4 < 2 ? scale : scale8, d_[half * 64 + i]);
      }
      stage_.next();
    }
  }

  // Products of a step run while those of the next are asked for.
  __device__ void multiply_bf16(int block, int group) {
    namespace ptx = kernel_core::ptx;
    namespace wgmma = kernel_core::wgmma;
    const uint32_t image = kFirstShared + C::kImagesAt + block * C::kImageBytes;
    const uint32_t weights = kFirstShared + group * C::kGroupBytes;
    MEGA_MOE_UNROLL
    for (int i = 0; i < 128; ++i) d_[i] = 0;
    int previous = 0;
    MEGA_MOE_NO_UNROLL
    for (int step = 0; step < product_.steps; ++step) {
      const uint32_t offset = stage_.at * C::kStageBytes;
      const uint64_t a = kColumnMajor | (image + offset) >> 4, b = kColumnMajor | (weights + offset) >> 4;
      ptx::mbarrier_wait(full_barrier<C>(stage_.at), stage_.parity);
      wgmma::fence();
      MEGA_MOE_UNROLL
      for (int k = 0; k < 4; ++k) product_bf16_shared(d_, wgmma::advance(a, k * 32), wgmma::advance(b, k * 32));
      wgmma::commit();
      wait_for_earlier_products();
      if (step > 0) release(previous);
      previous = stage_.at;
      stage_.next();
    }
    wgmma::wait<0>();
    wgmma::pin(d_);
    release(previous);
  }

  // `block`, `group`: of the expert and of the weight.
  __device__ void finish(int expert, int block, int group) {
    const int first = s_.plan.first[expert] + block * kBlockTokens;
    const int rows = s_.plan.first[expert + 1] - first;
    const int64_t weight_rows = static_cast<int64_t>(product_.groups) * kGroupRows;
    const int column = kernel_core::wgmma::accumulator_column(static_cast<int>(threadIdx.x % 128));
    if constexpr (C::kFp8) {
      const float* const factors =
          (kFirst ? p_.scale13 : p_.scale2) + expert * weight_rows + group * kGroupRows + column;
      MEGA_MOE_UNROLL
      for (int j = 0; j < 32; ++j) {
        const float2 factor = *reinterpret_cast<const float2*>(factors + j * 8);
        MEGA_MOE_UNROLL
        for (int i = 0; i < 4; ++i) d_[4 * j + i] = cuda::mul_rn(d_[4 * j + i], i % 2 == 0 ? factor.x : factor.y);
      }
    }
    if constexpr (kFirst)
      store_hidden(first, rows, s_.plan.blocks[expert] + block, group);
    else
      store_parts(first, rows, group, column);
  }

  // 256 rows of the first weight are gate and up, by 8, of 128 channels: one chunk of hidden rows, or two.
  __device__ void store_hidden(int first, int rows, int block, int group) {
    constexpr int kChunks = kFp8Group / C::kColumns;
    uint8_t* const to = p_.hidden + chunks_bytes(block, p_.inter, C::kFp8) + group * kChunks * chunk_bytes(C::kFp8);
    MEGA_MOE_UNROLL
    for (int below = 0; below < 2; ++below) {
      const int row = row_ + below * 8;
      const float gain = row < rows ? p_.weights[p_.rows[first + row]] : 0.0f;
      uint32_t top = 0;
      MEGA_MOE_UNROLL
      for (int j = 0; j < 16; ++j) {  // 8 channels
        MEGA_MOE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& gate = d_[j * 8 + below * 2 + i];
          gate = gated(gate, d_[j * 8 + 4 + below * 2 + i], p_.limit, gain);
          top = max(top, cuda::magnitude_bits(gate));
        }
      }
      if constexpr (C::kFp8)
        store_row_fp8(to, row, row < rows, below, top);
      else
        store_row_bf16(to, row, row < rows, below);
    }
  }

  __device__ void store_row_fp8(uint8_t* to, int row, bool inside, int below, uint32_t top) const {
    top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
    top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
    const Fp8Scale scale = fp8_scale(top);
    MEGA_MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];  // of 16 channels each: two, and two that lie 8 further on
      MEGA_MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* const at = &d_[half * 64 + i * 16 + below * 2];
        words[i] = pack_e4m3(cuda::mul_rn(at[0], scale.inverse), cuda::mul_rn(at[1], scale.inverse)) |
                   pack_e4m3(cuda::mul_rn(at[8], scale.inverse), cuda::mul_rn(at[9], scale.inverse)) << 16;
      }
      transpose(words);
      if (inside)
        *reinterpret_cast<uint4*>(to + kernel_core::wgmma::swizzle128(row, half * 64 + lane_ % 4 * 16)) = {
            cuda::prmt(words[0], words[1], 0x5410), cuda::prmt(words[2], words[3], 0x5410),
            cuda::prmt(words[0], words[1], 0x7632), cuda::prmt(words[2], words[3], 0x7632)};
    }
    if (inside && lane_ % 4 == 0) *reinterpret_cast<float*>(to + kChunkCodes + row * 4) = scale.scale;
  }

  __device__ void store_row_bf16(uint8_t* to, int row, bool inside, int below) const {
    MEGA_MOE_UNROLL
    for (int j = 0; j < 16; j += 4) {  // 32 channels
      uint32_t words[4];
      MEGA_MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* const at = &d_[(j + i) * 8 + below * 2];
        words[i] = cuda::pack_bf16(at[0], at[1]);
      }
      transpose(words);
      if (inside)
        *reinterpret_cast<uint4*>(to + j / 8 * kChunkCodes +
                                  kernel_core::wgmma::swizzle128(row, (j % 8 + lane_ % 4) * 16)) = {words[0], words[1],
                                                                                                    words[2], words[3]};
    }
  }

  // Lane l of a quad gets what its lanes have at l.
  __device__ void transpose(uint32_t (&words)[4]) const {
    MEGA_MOE_UNROLL
    for (int step = 1; step <= 2; ++step) {
      const bool upper = lane_ & step;
      MEGA_MOE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int low = step == 1 ? 2 * i : i, high = low + step;
        const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[low] : words[high], step);
        words[low] = upper ? got : words[low];
        words[high] = upper ? words[high] : got;
      }
    }
  }

  __device__ void store_parts(int first, int rows, int group, int column) const {
    MEGA_MOE_UNROLL
    for (int below = 0; below < 2; ++below) {
      const int row = row_ + below * 8;
      const bool inside = row < rows;
      const int64_t at = (inside ? static_cast<int64_t>(p_.rows[first + row]) * p_.d : 0) + group * kGroupRows;
      MEGA_MOE_UNROLL
      for (int j = 0; j < 32; j += 4) {
        float values[4][2];
        MEGA_MOE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* const sums = &d_[(j + i) * 4 + below * 2];
          values[i][0] = cuda::add_rn(sums[0], 0.0f),
          values[i][1] = cuda::add_rn(sums[1], 0.0f);  // no -0, as sums of slots
        }
        if (p_.parts_are_float) {
          MEGA_MOE_UNROLL
          for (int i = 0; i < 4; ++i)
            if (inside)
              *reinterpret_cast<float2*>(static_cast<float*>(p_.parts) + at + (j + i) * 8 + column) = {values[i][0],
                                                                                                       values[i][1]};
        } else {
          uint32_t words[4];
          MEGA_MOE_UNROLL
          for (int i = 0; i < 4; ++i) words[i] = cuda::pack_bf16(values[i][0], values[i][1]);
          transpose(words);
          if (inside)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p_.parts) + at + (j + lane_ % 4) * 8) = {
                words[0], words[1], words[2], words[3]};
        }
      }
    }
  }

  const PrefillParams& p_;
  const PrefillProduct& product_;
  PrefillShared<C>& s_;
  const int lane_, group_, row_;
  StageRing<C::kStages> stage_;
  float d_[128];
  float sums_[64];  // E4M3
};

}  // namespace mega_moe::sm90
