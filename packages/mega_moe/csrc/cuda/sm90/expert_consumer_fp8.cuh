// The consumers of W4A8: rows are quantised on their way to images, sums leave the tensor unit every 128 columns.
#pragma once

#include "expert_consumer.cuh"
#include "expert_fp8.cuh"

namespace mega_moe::sm90 {

template <typename C>
class ConsumerFp8 : public Consumer<C> {
  using Base = Consumer<C>;
  using Base::kColumnMajor;
  using Base::lane_;
  using Base::p_;
  using Base::s_;
  using Base::stage_;
  using Base::warp_;

 public:
  __device__ ConsumerFp8(const ExpertsParams& p, ExpertShared<C>& shared) : Base(p, shared) {}

  __device__ void run() {
    if (p_.parts_of_work & kGather) Base::begin_with_ranks(), gather();
    if (p_.parts_of_work & (kFirst | kSecond)) multiply();
    if (p_.parts_of_work & kCombine) Base::combine();
    Base::leave();
  }

 private:
  // A warp takes 1024 channels of a row, 8 a lane, 16 lanes a group; some rows at once, each first its number.
  __device__ void gather() {
    constexpr int kPart = 1024, kUnits = 3;
    const int parts = (p_.d + kPart - 1) / kPart, units = p_.offsets[p_.experts] * parts;
    const int warps = static_cast<int>(gridDim.x) * (C::kConsumers / 32);
    MEGA_MOE_NO_UNROLL
    for (int first = static_cast<int>(blockIdx.x) + warp_ * static_cast<int>(gridDim.x); first < units;
         first += kUnits * warps) {
      RankRow from[kUnits] = {};
      MEGA_MOE_UNROLL
      for (int u = 0; u < kUnits; ++u)
        if (first + u * warps < units) from[u] = rank_row(p_.ranks, p_.rows[(first + u * warps) / parts]);
      uint4 v[kUnits][4];
      MEGA_MOE_UNROLL
      for (int i = 0; i < kUnits * 4; ++i) {
        const int u = i / 4, unit = first + u * warps, channel = unit % parts * kPart + i % 4 * 256 + lane_ * 8;
        v[u][i % 4] = {0, 0, 0, 0};
        if (unit < units && channel < p_.d)
          v[u][i % 4] =
              Base::load_piece(p_.ranks.x[from[u].rank], static_cast<int64_t>(from[u].row / p_.slots) * p_.d + channel);
      }
      MEGA_MOE_UNROLL
      for (int u = 0; u < kUnits; ++u)
        if (first + u * warps < units) store_quantized(v[u], first + u * warps, parts);
    }
    Base::announce(kGathered);
  }

  __device__ void store_quantized(const uint4 (&v)[4], int unit, int parts) const {
    const int position = unit / parts, ordinal = find_ordinal(s_.plan.first, p_.experts, position);
    const RowPlace place = row_place(s_.plan, ordinal, position - s_.plan.first[ordinal], C::kColumns);
    const int64_t chunk = fp8_chunk_bytes(place.columns);
    uint8_t* const to = p_.images + place.image_row * (p_.d / kFp8Group) * fp8_chunk_bytes(1);
    MEGA_MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int channel = unit % parts * 1024 + i * 256 + lane_ * 8;
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      uint32_t top = 0;
      MEGA_MOE_UNROLL
      for (int j = 0; j < 4; ++j) top = max(top, max(words[j] << 16 & 0x7FFFFFFF, words[j] & 0x7FFF0000));
      MEGA_MOE_UNROLL
      for (int step = 1; step < 16; step *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
      const Fp8Scale scale = fp8_scale(top);
      uint32_t out[4];
      MEGA_MOE_UNROLL
      for (int j = 0; j < 4; ++j)
        out[j] = pack_e4m3(cuda::mul_rn(cuda::bits_float(words[j] << 16), scale.inverse),
                           cuda::mul_rn(cuda::bits_float(words[j] & 0xFFFF0000u), scale.inverse));
      if (channel >= p_.d) continue;
      uint8_t* const at = to + channel / kFp8Group * chunk;
      *reinterpret_cast<uint2*>(at + kernel_core::wgmma::swizzle128(place.row, channel % kFp8Group)) = {
          out[0] | out[1] << 16, out[2] | out[3] << 16};
      if (lane_ % 16 == 0) *reinterpret_cast<float*>(at + place.columns * kFp8Group + place.row * 4) = scale.scale;
    }
  }

  __device__ void multiply() {
    namespace ptx = kernel_core::ptx;
    Ring slot;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kMostColumns; i += C::kConsumers) s_.amax[i] = 0;
    ptx::named_barrier_sync(Base::kMeet, C::kConsumers);
    MEGA_MOE_NO_UNROLL
    for (int hidden = 0;; slot.next(kSlots)) {  // items that made hidden rows
      ptx::mbarrier_wait(ptx::shared_address(&s_.known[slot.at]), slot.parity);
      const ItemSlot& its = s_.slots[slot.at];
      if (uniform(static_cast<int>(its.item.kind)) == static_cast<int>(Kind::end)) return;
      const uint32_t rows_known = ptx::shared_address(&s_.rows_known[slot.at]);
      int* const amax = s_.amax + hidden * kMostColumns;
      if (uniform(static_cast<int>(its.item.kind)) == static_cast<int>(Kind::first)) hidden ^= 1;
      if (C::kColumns == 64 || uniform(its.item.columns) == 64)
        one<64>(its, rows_known, slot.parity, amax);
      else
        one<C::kColumns>(its, rows_known, slot.parity, amax);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.stored[slot.at]));
    }
  }

  template <int N>
  __device__ void one(const ItemSlot& its, uint32_t rows_known, int parity, int* amax) {
    const bool first = uniform(static_cast<int>(its.item.kind)) == static_cast<int>(Kind::first);
    float d[C::kBlocks][N / 2];
    MEGA_MOE_UNROLL
    for (int i = 0; i < C::kBlocks * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0;
    accumulate<N>(d, (first ? p_.d : p_.inter) / kFp8Group);
    const int64_t row = static_cast<int64_t>(its.item.ordinal) * (first ? 2 * p_.inter : p_.d) +
                        its.item.block * (C::kBlocks * kBlockRows) + warp_ * 16 + lane_ / 4;
    const float* const factors = (first ? p_.scale13 : p_.scale2) + row;
    MEGA_MOE_UNROLL
    for (int b = 0; b < C::kBlocks; ++b) {
      const float factor = factors[b * kBlockRows], factor8 = factors[b * kBlockRows + 8];
      MEGA_MOE_UNROLL
      for (int i = 0; i < N / 2; ++i) d[b][i] = cuda::mul_rn(d[b][i], i % 4 < 2 ? factor : factor8);
    }
    kernel_core::ptx::mbarrier_wait(rows_known, parity);
    if (first) {
      store_hidden<N>(its, d, amax);
      kernel_core::ptx::named_barrier_sync(Base::kMeet, C::kConsumers);  // the next item's maxima are zeroed
    } else {
      MEGA_MOE_UNROLL
      for (int b = 0; b < C::kBlocks; ++b) Base::template store_parts<N>(its, its.item.block * C::kBlocks + b, d[b]);
    }
  }

  // ---- products --------------------------------------------------------------------------------------------------

  // 128 columns of 64 rows of each tile for 64 tokens at a time into registers of their own, then times the tokens'
  // scales onto the sums. Two such sets take turns: one is added up while the products of the other run. Sums of a set
  // are one group of products: ptxas 13.0 gives registers away that a second group of the same sums still owns, once
  // the first is waited for. No group runs from one turn of the loop into the next, or every product would be waited
  // for by itself (C7514).
  template <int N>
  __device__ void accumulate(float (&d)[C::kBlocks][N / 2], int turns) {
    namespace ptx = kernel_core::ptx;
    namespace wgmma = kernel_core::wgmma;
    constexpr int kParts = N / 64, kCount = C::kBlocks * kParts;
    const int group = warp_ / 4, thread = static_cast<int>(threadIdx.x % 128);
    const uint32_t codes_at = kFirstShared + C::kImageBytes + group * kTileCodes + thread * 16;
    const uint32_t scales_at =
        kFirstShared + C::kImageBytes + kTiles * kTileCodes + group * Step<Format::mxfp4>::kScaleBytes + thread / 4 * 8;
    const uint32_t tokens_at = kFirstShared + N * kFp8Group + lane_ % 4 * 8;
    float sums[2][32];
    uint32_t a[kParts == 1 ? 2 : 1][4][4];  // one set of operands: two find no registers beside 128 tokens
    MEGA_MOE_NO_UNROLL
    for (int turn = 0; turn < turns; ++turn) {
      const uint32_t offset = stage_.at * C::kStageBytes;
      const uint32_t columns = uniform((kFirstShared + offset) / 16 + static_cast<uint32_t>(kColumnMajor));
      const auto add_up = [&](int i) {
        wgmma::pin(sums[i % 2]);
        promote<N>(d[i / kParts], sums[i % 2], i % kParts, tokens_at + offset);
      };
      ptx::mbarrier_wait(ptx::shared_address(&s_.full[stage_.at]), stage_.parity);
      MEGA_MOE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const int block = i / kParts, part = i % kParts;
        auto& operands = a[kParts == 1 ? block % 2 : 0];
        if (part == 0) {
          if (kParts == 2 && i > 0) wgmma::wait<0>();
          expand(codes_at + offset + block * C::kBlockBytes, scales_at + offset + block * C::kBlockBytes, operands);
        }
        wgmma::fence();
        MEGA_MOE_UNROLL
        for (int j = 0; j < 4; ++j)
          product_e4m3(sums[i % 2], operands[j], kColumnMajor >> 32 << 32 | (columns + part * (64 * 128 / 16) + j * 2),
                       j > 0);
        wgmma::commit();
        if (i > 0) wgmma::wait<1>(), add_up(i - 1);
      }
      wgmma::wait<0>();
      add_up(kCount - 1);
      Base::release(ptx::shared_address(&s_.empty[stage_.at]));
      stage_.next(C::kStages);
    }
  }

  __device__ static void expand(uint32_t codes_at, uint32_t scales_at, uint32_t (&a)[4][4]) {
    const uint2 scales = load_shared_8(scales_at);
    MEGA_MOE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 v = kernel_core::ptx::load_shared_16(codes_at + piece * kPieceBytes);
      const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
      expand_piece_fp8(codes, piece == 0 ? scales.x : scales.y, a[2 * piece], a[2 * piece + 1]);
    }
  }

  template <int N>
  __device__ static void promote(float (&d)[N / 2], const float (&sums)[32], int part, uint32_t tokens_at) {
    MEGA_MOE_UNROLL
    for (int j = 0; j < 8; ++j) {
      const uint2 bits = load_shared_8(tokens_at + (part * 64 + j * 8) * 4);
      const float scale[2] = {cuda::bits_float(bits.x), cuda::bits_float(bits.y)};
      MEGA_MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& to = d[part * 32 + 4 * j + i];
        to = fused(sums[4 * j + i], scale[i % 2], to);
      }
    }
  }

  // ---- hidden rows -----------------------------------------------------------------------------------------------

  // An item makes 128 channels, one group: all consumers find each row's largest together.
  template <int N>
  __device__ void store_hidden(const ItemSlot& its, float (&d)[C::kBlocks][N / 2], int* amax) {
    static_assert(C::kBlocks * 64 == kFp8Group);
    const int rows = its.item.rows;
    MEGA_MOE_UNROLL
    for (int j = 0; j < N / 8; ++j) {
      MEGA_MOE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = j * 8 + lane_ % 4 * 2 + i;
        const float weight = row < rows ? its.weight[row] : 0.0f;
        uint32_t top = 0;
        MEGA_MOE_UNROLL
        for (int b = 0; b < C::kBlocks; ++b) {
          d[b][4 * j + i] = gated(d[b][4 * j + i], d[b][4 * j + i + 2], p_.limit, weight);
          top = max(top, cuda::magnitude_bits(d[b][4 * j + i]));
        }
        MEGA_MOE_UNROLL
        for (int step = 4; step < 32; step *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
        if (lane_ < 4) atomicMax(amax + row, static_cast<int>(top));
      }
    }
    kernel_core::ptx::named_barrier_sync(Base::kMeet, C::kConsumers);
    int* const next = amax == s_.amax ? s_.amax + kMostColumns : s_.amax;
    for (int i = static_cast<int>(threadIdx.x); i < kMostColumns; i += C::kConsumers) next[i] = 0;
    uint8_t* const to = p_.hidden + its.item.image_row * (p_.inter / kFp8Group) * fp8_chunk_bytes(1) +
                        its.item.block * fp8_chunk_bytes(N);
    const int odd = lane_ / 4 % 2;
    MEGA_MOE_UNROLL
    for (int j = 0; j < N / 8; ++j) {
      const int row = j * 8 + lane_ % 4 * 2;
      const Fp8Scale scales[2] = {fp8_scale(static_cast<uint32_t>(amax[row])),
                                  fp8_scale(static_cast<uint32_t>(amax[row + 1]))};
      MEGA_MOE_UNROLL
      for (int b = 0; b < C::kBlocks; ++b) {
        const float h0 = cuda::mul_rn(d[b][4 * j], scales[0].inverse);
        const float h1 = cuda::mul_rn(d[b][4 * j + 1], scales[1].inverse);
        const float other = __shfl_xor_sync(0xFFFFFFFFu, odd ? h0 : h1, 4);
        const int channel = b * 64 + warp_ * 8 + lane_ / 4 - odd;  // the pair's first
        if (row + odd < rows)
          *reinterpret_cast<uint16_t*>(to + kernel_core::wgmma::swizzle128(row + odd, channel)) =
              static_cast<uint16_t>(odd ? pack_e4m3(other, h1) : pack_e4m3(h0, other));
      }
      if (warp_ == 0 && lane_ < 4) {
        MEGA_MOE_UNROLL
        for (int i = 0; i < 2; ++i)
          if (row + i < rows) *reinterpret_cast<float*>(to + N * kFp8Group + (row + i) * 4) = scales[i].scale;
      }
    }
  }
};

}  // namespace mega_moe::sm90
