// The two warpgroups that multiply: gathering, products, what becomes of their sums, and adding up slots.
#pragma once

#include "expert_combine.cuh"
#include "expert_config.cuh"

namespace mega_moe::sm90 {

template <typename C>
class Consumer {
 public:
  __device__ Consumer(const ExpertsParams& p, ExpertShared<C>& shared)
      : p_(p),
        s_(shared),
        warp_(uniform(static_cast<int>(threadIdx.x / 32))),
        lane_(static_cast<int>(threadIdx.x % 32)) {}

  __device__ void run() {
    if (p_.parts_of_work & kGather) {
      begin_with_ranks();
      if (!C::kDirect || p_.x_is_float) gather();
    }
    if (p_.parts_of_work & (kFirst | kSecond)) multiply();
    if (p_.parts_of_work & kCombine) combine();
    leave();
    mark(p_, kEnded, threadIdx.x == 0);
  }

 protected:
  // The warp among those of its block, and the block of an item that its warpgroup begins with.
  __device__ int tile_warp() const { return C::kSplit == 1 ? warp_ : warp_ % 8; }
  __device__ int own_block() const { return C::kSplit == 1 ? 0 : warp_ / 8; }

  static constexpr uint64_t kColumnMajor = kernel_core::wgmma::k_major(0);  // the address is in its lowest bits
  static constexpr uint32_t kMeet = 1;                                      // the named barrier of all consumers

  // ---- rows to images --------------------------------------------------------------------------------------------

  // Warps take fifths of rows (of 5120 channels): 128 pieces of 16 bytes. Some fifths at once, each first its row's
  // number, then its pieces.
  __device__ void gather() {
    constexpr int kPart = 128, kUnits = C::kColumns < 64 ? 1 : 3;
    const int pieces = p_.d / 8, parts = (pieces + kPart - 1) / kPart;
    const int shared_rows = s_.plan.has_shared ? p_.tokens : 0;
    const int units = (shared_rows + p_.offsets[p_.experts]) * parts;
    const int warps = static_cast<int>(gridDim.x) * (C::kConsumers / 32);
    MEGA_MOE_NO_UNROLL
    for (int first = static_cast<int>(blockIdx.x) + warp_ * static_cast<int>(gridDim.x); first < units;
         first += kUnits * warps) {
      RankRow from[kUnits];
      MEGA_MOE_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        const int unit = first + u * warps, row = unit / parts;
        from[u] = {p_.ranks.rank, row * p_.slots};
        if (unit < units && row >= shared_rows) from[u] = rank_row(p_.ranks, p_.rows[row - shared_rows]);
      }
      uint4 v[kUnits][kPart / 32];
      MEGA_MOE_UNROLL
      for (int i = 0; i < kUnits * kPart / 32; ++i) {
        const int u = i / (kPart / 32), unit = first + u * warps;
        const int piece = unit % parts * kPart + i % (kPart / 32) * 32 + lane_;
        if (unit < units && piece < pieces)
          v[u][i % (kPart / 32)] =
              load_piece(p_.ranks.x[from[u].rank], static_cast<int64_t>(from[u].row / p_.slots) * p_.d + piece * 8);
      }
      MEGA_MOE_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        const int unit = first + u * warps, row = unit / parts;
        if (unit >= units) break;
        int ordinal = 0, local = row;
        if (row >= shared_rows) {
          const int position = row - shared_rows;
          ordinal = s_.plan.has_shared + find_ordinal(s_.plan.first + s_.plan.has_shared, p_.experts, position);
          local = position - s_.plan.first[ordinal];
        }
        const RowPlace place = row_place(s_.plan, ordinal, local, C::kColumns);
        uint8_t* const to = p_.images + static_cast<int64_t>(place.image_row) * p_.d * 2;
        MEGA_MOE_UNROLL
        for (int i = 0; i < kPart / 32; ++i) {
          const int piece = unit % parts * kPart + i * 32 + lane_;
          if (piece < pieces)
            *reinterpret_cast<uint4*>(to + image_offset(place.columns, place.row, int64_t{piece} * 16)) = v[u][i];
        }
      }
    }
    announce(kGathered);
  }

  __device__ uint4 load_piece(const void* x, int64_t at) const {
    if (!p_.x_is_float) return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + at);
    const float4 a = *reinterpret_cast<const float4*>(static_cast<const float*>(x) + at);
    const float4 b = *reinterpret_cast<const float4*>(static_cast<const float*>(x) + at + 4);
    return {cuda::pack_bf16(a.x, a.y), cuda::pack_bf16(a.z, a.w), cuda::pack_bf16(b.x, b.y), cuda::pack_bf16(b.z, b.w)};
  }

  // All consumers have stored what others wait for.
  __device__ void announce(int word) const {
    fence_proxy_async_all();
    __threadfence();
    kernel_core::ptx::named_barrier_sync(kMeet, C::kConsumers);
    if (threadIdx.x == 0) count_release(p_.state + word);
  }

  // Before anything of another rank is read or written.
  __device__ void begin_with_ranks() const {
    if (p_.ranks.world == 1 || p_.ranks.met) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      __threadfence_system();
      tell_ranks(p_, 0);
    }
    meet_ranks(0);
  }

  // All consumers wait for all ranks' flags of a kind.
  __device__ void meet_ranks(int kind) const {
    wait_for_ranks(p_, kind, static_cast<int>(threadIdx.x));
    kernel_core::ptx::named_barrier_sync(kMeet, C::kConsumers);
  }

  // ---- items -----------------------------------------------------------------------------------------------------

  __device__ void multiply() {
    namespace ptx = kernel_core::ptx;
    Ring slot;
    MEGA_MOE_NO_UNROLL
    for (;; slot.next(kSlots)) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.known[slot.at]), slot.parity);
      const Item& item = s_.slots[slot.at].item;
      if (uniform(static_cast<int>(item.kind)) == static_cast<int>(Kind::end)) return;
      const uint32_t rows_known = ptx::shared_address(&s_.rows_known[slot.at]);
      const int columns = uniform(item.columns);
      if constexpr (C::kLeast == 8)
        if (columns == 8) one<8>(s_.slots[slot.at], rows_known, slot.parity);
      if constexpr (C::kLeast == 8 && C::kColumns >= 16)
        if (columns == 16) one<16>(s_.slots[slot.at], rows_known, slot.parity);
      if constexpr (C::kLeast == 8 && C::kColumns >= 32)
        if (columns == 32) one<32>(s_.slots[slot.at], rows_known, slot.parity);
      if constexpr (C::kColumns >= 64)
        if (columns == 64) one<64>(s_.slots[slot.at], rows_known, slot.parity);
      if constexpr (C::kColumns >= 128)
        if (columns == 128) one<128>(s_.slots[slot.at], rows_known, slot.parity);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.stored[slot.at]));
    }
  }

  template <int N>
  __device__ void one(const ItemSlot& its, uint32_t rows_known, int parity) {
    const bool first = uniform(static_cast<int>(its.item.kind)) == static_cast<int>(Kind::first);
    if (!first && !seconds_) mark(p_, kSecondKnown, threadIdx.x == 0);
    const int ordinal = uniform(its.item.ordinal), width = first ? p_.d : p_.inter;
    float d[C::kOwn][N / 2];
    MEGA_MOE_UNROLL
    for (int i = 0; i < C::kOwn * N / 2; ++i) d[i / (N / 2)][i % (N / 2)] = 0;
    if (s_.plan.has_shared && ordinal == 0 && p_.shared_format == static_cast<int>(Format::fp8))
      accumulate<N, Format::fp8>(d, width / (step_columns(Format::fp8) * C::kSteps));
    else
      accumulate<N, Format::mxfp4>(d, width / (step_columns(Format::mxfp4) * C::kSteps));
    kernel_core::ptx::mbarrier_wait(rows_known, parity);
    MEGA_MOE_UNROLL
    for (int b = 0; b < C::kOwn; ++b) {
      const int block = its.item.block * C::kBlocks + own_block() + b;
      if (first)
        store_hidden<N>(its, block, d[b]);
      else
        store_parts<N>(its, block, d[b]);
    }
    mark(p_, first ? kFirstsStored : kLastStored, threadIdx.x == 0);
    if (first && !firsts_) mark(p_, kFirstItem, threadIdx.x == 0);
    first ? ++firsts_ : ++seconds_;
  }

  // ---- products --------------------------------------------------------------------------------------------------

  template <int N, Format F>
  __device__ void accumulate(float (&d)[C::kOwn][N / 2], int turns) {
    namespace ptx = kernel_core::ptx;
    namespace wgmma = kernel_core::wgmma;
    using S = Step<F>;
    constexpr int kCount = C::kSteps * kPieces * C::kOwn;  // pieces of a stage, a piece of each block in turn
    constexpr auto block_of = [](int i) { return i % C::kOwn; };
    constexpr auto piece_of = [](int i) { return i / C::kOwn; };
    constexpr auto step_at = [](int block, int step) { return block * C::kBlockBytes + step * step_bytes(F); };
    const int group = tile_warp() / 4, thread = static_cast<int>(threadIdx.x % 128);
    const uint32_t own = kFirstShared + C::kImageBytes + own_block() * C::kBlockBytes;
    const uint32_t codes_at = own + group * kTileCodes + thread * 16;
    const uint32_t scales_at =
        own + kTiles * kTileCodes + group * S::kScaleBytes + (F == Format::mxfp4 ? thread / 4 * 8 : thread / 32 * 4);
    uint32_t previous = 0;
    constexpr int kGroup = C::kGroup;  // pieces whose products are asked for together
    static_assert(kCount % (2 * kGroup) == 0);
    uint32_t a[2][kGroup][S::kProducts][4];
    MEGA_MOE_NO_UNROLL
    for (int turn = 0; turn < turns; ++turn) {
      const uint32_t offset = stage_.at * C::kStageBytes;
      const uint32_t columns = uniform((kFirstShared + offset) / 16 + static_cast<uint32_t>(kColumnMajor));
      const uint32_t full = ptx::shared_address(&s_.full[stage_.at]);
      ptx::mbarrier_wait(full, stage_.parity);
      if (turn == 0 && !seconds_) mark(p_, firsts_ == 0 ? kFirstFull : kSecondFull, threadIdx.x == 0);
      const auto load = [&](int i) {
        const int step = piece_of(i) / kPieces, piece = piece_of(i) % kPieces;
        return ptx::load_shared_16(codes_at + offset + step_at(block_of(i), step) + piece * kPieceBytes);
      };
      uint32_t scales[C::kSteps * C::kOwn][kPieces][2];
      MEGA_MOE_UNROLL
      for (int i = 0; i < C::kSteps * C::kOwn; ++i)
        load_scales<F>(scales_at + offset + step_at(block_of(i), i / C::kOwn), scales[i]);
      uint4 next = load(0);
      MEGA_MOE_UNROLL
      for (int g = 0; g < kCount / kGroup; ++g) {
        MEGA_MOE_UNROLL
        for (int q = 0; q < kGroup; ++q) {
          const int i = g * kGroup + q, piece = piece_of(i), block = block_of(i);
          const uint32_t codes[4] = {next.x, next.y, next.z, next.w};
          if (i + 1 < kCount) next = load(i + 1);
          expand_piece(codes, scales[piece / kPieces * C::kOwn + block][piece % kPieces], a[g % 2][q], S{});
        }
        wgmma::wait<0>();  // the products of the group before, which ran while this one was expanded
        if (g == 0 && turn > 0) release(previous);
        wgmma::fence();
        MEGA_MOE_UNROLL
        for (int k = 0; k < kGroup * S::kProducts; ++k) {
          // Two blocks take turns, so that a product does not wait for the sums of the one before.
          const int q = C::kOwn == 1 ? k / S::kProducts : k % kGroup, j = C::kOwn == 1 ? k % S::kProducts : k / kGroup;
          const int i = g * kGroup + q, column = (piece_of(i) * S::kProducts + j) * 16;  // of the stage
          const uint32_t at = columns + (column / 64 * (N * 128) + column % 64 * 2) / 16;
          wgmma::Product<N>::template rs<wgmma::Major::k>(d[block_of(i)], a[g % 2][q][j], kColumnMajor >> 32 << 32 | at,
                                                          1);
        }
        wgmma::commit();
      }
      previous = full + (ptx::shared_address(s_.empty) - ptx::shared_address(s_.full));
      stage_.next(C::kStages);
    }
    wgmma::wait<0>();
    MEGA_MOE_UNROLL
    for (int b = 0; b < C::kOwn; ++b) wgmma::pin(d[b]);
    release(previous);
  }

  // Of a step's pieces, as expand_piece takes them.
  template <Format F>
  __device__ static void load_scales(uint32_t from, uint32_t (&scales)[kPieces][2]) {
    if constexpr (F == Format::mxfp4) {
      const uint2 v = load_shared_8(from);
      scales[0][0] = v.x, scales[1][0] = v.y, scales[0][1] = scales[1][1] = 0;
    } else {
      const uint32_t v = load_shared_4(from);
      MEGA_MOE_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        scales[i][0] = cuda::mxfp8_factor(v >> (8 * i) & 0xFF);
        scales[i][1] = cuda::mxfp8_factor(v >> (8 * i + 16) & 0xFF);
      }
    }
  }

  __device__ void release(uint32_t empty) const {
    __syncwarp();
    if (lane_ == 0) kernel_core::ptx::mbarrier_arrive(empty);
  }

  // ---- results ---------------------------------------------------------------------------------------------------

  // Gate and up of one channel, of two neighbouring rows of the tile for each j. Neighbouring lanes of a column swap
  // one of two values, so that each stores a pair of channels.
  template <int N>
  __device__ void store_hidden(const ItemSlot& its, int block, const float (&d)[N / 2]) const {
    const int rows = its.item.rows, odd = lane_ / 4 % 2;
    const int channel = tile_warp() * 8 + lane_ / 4 - odd;  // of the block's 64, the pair's first
    uint8_t* const to =
        p_.hidden + static_cast<int64_t>(its.item.image_row) * p_.inter * 2 + static_cast<int64_t>(block) * N * 128;
    MEGA_MOE_UNROLL
    for (int j = 0; j < N / 8; ++j) {
      const int row = j * 8 + lane_ % 4 * 2;
      const float h0 = gated(d[4 * j], d[4 * j + 2], p_.limit, row < rows ? its.weight[row] : 0.0f);
      const float h1 = gated(d[4 * j + 1], d[4 * j + 3], p_.limit, row + 1 < rows ? its.weight[row + 1] : 0.0f);
      const float other = __shfl_xor_sync(0xFFFFFFFFu, odd ? h0 : h1, 4);
      if (row + odd < rows)
        *reinterpret_cast<uint32_t*>(to + kernel_core::wgmma::swizzle128(row + odd, channel * 2)) =
            odd ? cuda::pack_bf16(other, h1) : cuda::pack_bf16(h0, other);
    }
  }

  template <int N>
  __device__ void store_parts(const ItemSlot& its, int block, const float (&d)[N / 2]) const {
    const int rows = its.item.rows;
    const int column = block * kBlockRows + tile_warp() * 16 + lane_ / 4;
    MEGA_MOE_UNROLL
    for (int j = 0; j < N / 8; ++j) {
      MEGA_MOE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int row = j * 8 + lane_ % 4 * 2 + i;
        if (row < rows) {
          float* const at = its.part[row] + column;
          at[0] = d[4 * j + i];
          at[8] = d[4 * j + 2 + i];
        }
      }
    }
  }

  // ---- sums of slots ---------------------------------------------------------------------------------------------

  // Slots in their order, then the shared expert, in float32, four channels a thread.
  __device__ void combine() {
    const int thread = static_cast<int>(threadIdx.x), lines = p_.d / 32, grid = static_cast<int>(gridDim.x);
    // Eight neighbours read a line of 128 bytes. Few lines are dealt to CTAs; of many, a CTA's threads read
    // neighbouring ones. `step`: from a thread's quad to its next one.
    const int block = static_cast<int>(blockIdx.x), all = C::kConsumers / 8 * grid;
    const bool few = static_cast<int64_t>(p_.tokens) * lines <= all;
    const int line = few ? thread / 8 * grid + block : block * (C::kConsumers / 8) + thread / 8;
    const Quad first = {line / lines, line % lines * 8 + thread % 8}, step = {all / lines, all % lines * 8};
    if (first.token < p_.tokens)
      prefetch_line(p_.ids + static_cast<int64_t>(first.token) * p_.slots);  // beside the wait
    bool whole = true;
    if (p_.ranks.world > 1) {
      if (blockIdx.x == 0 && threadIdx.x == 0 && second_items(s_.plan) == 0) tell_ranks(p_, p_.ranks.world);
      meet_ranks(p_.ranks.world);
      whole = load_acquire(p_.state + kReport) == 0;
    } else if (p_.parts_of_work & kSecond) {
      if (p_.ranks.world == 1) {
        if (threadIdx.x == 0) wait_for_count(p_.state, kSecondDone, second_items(s_.plan));
        kernel_core::ptx::named_barrier_sync(kMeet, C::kConsumers);
      }
      whole = load_acquire(p_.state + kReport) == 0;
    }
    if (thread == 0) before_ = count_out();  // nobody here looks at a counter again; the answer comes beside the sums
    mark(p_, kSumBegins, thread == 0);
    const bool shared = s_.plan.has_shared;
    if (few)
      sum_slots<1, 6>(p_, first, step, shared, whole);  // one each: short code, which is not in a cache yet
    else if (p_.slots == 1)
      sum_slots<(C::kColumns >= 64 ? 8 : 4), 1>(p_, first, step, shared, whole);
    else
      sum_slots<(C::kConsumerRegisters > 128 ? 2 : 1), 6>(p_, first, step, shared, whole);
  }

  // One more CTA is through with counters; how many were before. One thread.
  __device__ int count_out() const {
    if (p_.parts_of_work & (kFirst | kSecond))  // else a late announcement would stay in a counter
      kernel_core::ptx::mbarrier_wait(kernel_core::ptx::shared_address(&s_.announced), 0);
    __threadfence();
    return atomicAdd(p_.state + kLeft, 1);
  }

  // The last CTA leaves the counters as it found them.
  __device__ void leave() {
    mark(p_, kSumEnds, threadIdx.x == 0);
    if (!(p_.parts_of_work & kCombine)) {
      kernel_core::ptx::named_barrier_sync(kMeet, C::kConsumers);
      if (threadIdx.x == 0) before_ = count_out();
    }
    if (warp_ != 0 || uniform(before_) + 1 != static_cast<int>(gridDim.x)) return;
    __threadfence();
    for (int i = lane_; i < total_tiles(s_.plan); i += 32) p_.state[kTileDone + i] = 0;
    if (lane_ < kReport) p_.state[lane_] = 0;
    if (lane_ == 0 && p_.ranks.world > 1 && p_.parts_of_work & kCombine) ++p_.state[kEpoch];
  }

  const ExpertsParams& p_;
  ExpertShared<C>& s_;
  const int warp_, lane_;
  int firsts_ = 0, seconds_ = 0;  // items stored
  int before_ = 0;                // CTAs that were through before this one; thread 0 knows
  Ring stage_;
};

}  // namespace mega_moe::sm90
