// The warps that do not multiply: the queue and the copies.
#pragma once

#include "expert_config.cuh"

namespace mega_moe::sm90 {

// Prefix sums over ordinals, by one warp.
template <typename C>
__device__ void make_plan(const ExpertsParams& p, ExpertPlan& plan) {
  const int lane = static_cast<int>(threadIdx.x % 32), shared = p.shared13 != nullptr;
  const int ordinals = p.experts + shared;
  int tiles = 0, images = 0;
  MEGA_MOE_NO_UNROLL
  for (int base = 0; base < ordinals; base += 32) {
    const int ordinal = base + lane, expert = ordinal - shared;
    int first = 0, count = 0;
    if (ordinal < ordinals) {
      first = expert < 0 ? 0 : p.offsets[expert];
      count = expert < 0 ? p.tokens : p.offsets[expert + 1] - first;
    }
    int tile_sum = tiles_of(count, C::kColumns), image_sum = image_rows(count, C::kColumns);
    const int own_tiles = tile_sum, own_images = image_sum;
    MEGA_MOE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int a = __shfl_up_sync(0xFFFFFFFFu, tile_sum, step), b = __shfl_up_sync(0xFFFFFFFFu, image_sum, step);
      if (lane >= step) tile_sum += a, image_sum += b;
    }
    if (ordinal < ordinals) {
      plan.first[ordinal] = first, plan.count[ordinal] = count;
      plan.tiles[ordinal] = tiles + tile_sum - own_tiles, plan.images[ordinal] = images + image_sum - own_images;
    }
    tiles += __shfl_sync(0xFFFFFFFFu, tile_sum, 31), images += __shfl_sync(0xFFFFFFFFu, image_sum, 31);
  }
  if (lane == 0) {
    plan.ordinals = ordinals, plan.has_shared = shared;
    plan.blocks1 = 2 * p.inter / (kBlockRows * C::kBlocks), plan.blocks2 = p.d / (kBlockRows * C::kBlocks);
    plan.tiles[ordinals] = tiles, plan.images[ordinals] = images;
  }
}

// Asks for what everybody reads before weights queue up in front of it: numbers of rows, gains and x. One warp a CTA;
// no more than what few tokens have.
__device__ inline void warm_caches(const ExpertsParams& p) {
  if (p.ranks.world > 1 || !(p.parts_of_work & kFirst)) return;
  constexpr int kLine = 128, kMost = 4;
  const int row_lines = (p.tokens * p.slots * 4 + kLine - 1) / kLine;
  const int64_t lines = 2 * row_lines + static_cast<int64_t>(p.tokens) * p.d * (p.x_is_float ? 4 : 2) / kLine;
  const int step = 32 * static_cast<int>(gridDim.x);
  int64_t line = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
  for (int i = 0; i < kMost && line < lines; ++i, line += step) {
    const void* from = p.x;
    int64_t at = line - 2 * row_lines;
    if (line < row_lines)
      from = p.rows, at = line;
    else if (line < 2 * row_lines)
      from = p.weights, at = line - row_lines;
    prefetch_line(static_cast<const uint8_t*>(from) + at * kLine);
  }
}

template <typename C>
class Producer {
 public:
  __device__ Producer(const ExpertsParams& p, ExpertShared<C>& shared)
      : p_(p), s_(shared), lane_(static_cast<int>(threadIdx.x % 32)) {}

  // Takes items from the queue, announces them and asks for their weights. One lane.
  __device__ void weights() {
    namespace ptx = kernel_core::ptx;
    if (lane_ != 0) return;
    const int begin = p_.parts_of_work & kFirst ? 0 : first_items(s_.plan);
    const int end = p_.parts_of_work & kSecond ? first_items(s_.plan) + second_items(s_.plan) : first_items(s_.plan);
    Ring slot, stage;
    int next = begin + static_cast<int>(blockIdx.x);  // the queue begins behind every CTA's first item
    for (bool more = true; more;) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.finished[slot.at]), slot.parity ^ 1);
      Item item = find_item(s_.plan, next, C::kColumns);
      if (next >= end) item.kind = Kind::end;
      s_.slots[slot.at].item = item;
      ptx::mbarrier_arrive(ptx::shared_address(&s_.known[slot.at]));
      slot.next(kSlots);
      more = item.kind != Kind::end;
      if (!more) break;
      const Format format = format_of(item.ordinal);
      const uint32_t bytes = step_bytes(format) * C::kSteps;
      const int turns = (item.kind == Kind::first ? p_.d : p_.inter) / (step_columns(format) * C::kSteps);
      const int64_t block = static_cast<int64_t>(turns) * bytes;
      const uint8_t* from = weight_of(item) + item.block * C::kBlocks * block;
      const int ask = turns > 2 ? turns - 2 : 0;  // early enough for the answer, late enough to share the work well
      MEGA_MOE_NO_UNROLL
      for (int i = 0; i < turns; ++i, from += bytes) {
        if (i == ask) next = begin + static_cast<int>(gridDim.x) + atomicAdd(p_.state + kQueue, 1);
        ptx::mbarrier_wait(ptx::shared_address(&s_.empty[stage.at]), stage.parity ^ 1);
        const uint32_t full = ptx::shared_address(&s_.full[stage.at]);
        const uint32_t to = ptx::shared_address(s_.stages[stage.at]) + C::kImageBytes;
        if (i == 0 && slot.parity == 0 && slot.at == 1) mark(p_, kAsked, true);
        ptx::mbarrier_arrive_expect_tx(full, C::kBlocks * bytes);
        MEGA_MOE_UNROLL
        for (int b = 0; b < C::kBlocks; ++b) ptx::cp_async_bulk(to + b * C::kBlockBytes, from + b * block, bytes, full);
        stage.next(C::kStages);
      }
    }
  }

  // Brings the activations of the items' steps, once they are there. One warp, or two that share rows of x: `part`.
  __device__ void images(int part) {
    namespace ptx = kernel_core::ptx;
    Ring slot, stage;
    const bool direct = C::kDirect && !p_.x_is_float, fused = (p_.parts_of_work & kFirst) != 0;
    bool gathered = !(p_.parts_of_work & kGather);
    if (direct && !gathered) {
      wait_for_ranks(p_, 0, lane_);
      __syncwarp();
      gathered = true;
    }
    for (;; slot.next(kSlots)) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.known[slot.at]), slot.parity);
      const Item item = s_.slots[slot.at].item;
      if (item.kind == Kind::end) return;
      if (direct && item.kind == Kind::first) {
        if constexpr (C::kDirect) stage_rows(item, part, stage);
      } else {
        if (lane_ == 0 && part == 0) {
          if (item.kind == Kind::first && !gathered) wait_for_count(p_.state, kGathered, static_cast<int>(gridDim.x));
          if (item.kind == Kind::second && fused) wait_for_count(p_.state, kTileDone + item.tile, s_.plan.blocks1);
          fence_proxy_async_all();
        }
        if (item.kind == Kind::first) gathered = true;
        stage_image(item, part, stage);
      }
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.finished[slot.at]));
    }
  }

  // Looks up the rows of items, then tells everybody that an item's results are stored. One warp.
  __device__ void rows() {
    namespace ptx = kernel_core::ptx;
    Ring slot;
    if (p_.parts_of_work & kGather) {
      wait_for_ranks(p_, 0, lane_);
      __syncwarp();
    }
    for (;; slot.next(kSlots)) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.known[slot.at]), slot.parity);
      ItemSlot& its = s_.slots[slot.at];
      if (its.item.kind == Kind::end) break;
      const bool shared = s_.plan.has_shared && its.item.ordinal == 0;
      for (int row = lane_; row < its.item.rows; row += 32) {
        const int at = its.item.first_row + row;
        if (shared) {
          its.part[row] = p_.parts + (static_cast<int64_t>(p_.tokens) * p_.slots + at) * p_.d;
          its.weight[row] = 1.0f;
        } else {
          const RankRow from = rank_row(p_.ranks, p_.rows[at]);
          its.part[row] = p_.ranks.parts[from.rank] + static_cast<int64_t>(from.row) * p_.d;
          its.weight[row] = p_.ranks.weights[from.rank][from.row];
        }
      }
      __syncwarp();
      if (lane_ == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&s_.rows_known[slot.at]));
        // Consumers go on meanwhile: what they have stored becomes visible in its own time.
        ptx::mbarrier_wait(ptx::shared_address(&s_.stored[slot.at]), slot.parity);
        announce_item(p_, s_.plan, its.item.kind, its.item.tile);
        ptx::mbarrier_arrive(ptx::shared_address(&s_.finished[slot.at]));
      }
      __syncwarp();
    }
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.announced));
  }

 private:
  // Of an item's activations, from images: what goes with a stage is contiguous. One lane of the first warp asks.
  __device__ void stage_image(const Item& item, int part, Ring& stage) {
    namespace ptx = kernel_core::ptx;
    const int columns = step_columns(format_of(item.ordinal)) * C::kSteps;
    const int width = item.kind == Kind::first ? p_.d : p_.inter, turns = width / columns;
    const auto bytes = static_cast<uint32_t>(C::stage_image_bytes(item.columns, columns));
    const uint8_t* from =
        (item.kind == Kind::first ? p_.images : p_.hidden) + static_cast<int64_t>(item.image_row) * C::row_bytes(width);
    MEGA_MOE_NO_UNROLL
    for (int i = 0; i < turns; ++i, from += bytes) {
      if (lane_ == 0) {
        ptx::mbarrier_wait(ptx::shared_address(&s_.empty[stage.at]), stage.parity ^ 1);
        const uint32_t full = ptx::shared_address(&s_.full[stage.at]);
        if (part == 0) {
          ptx::mbarrier_arrive_expect_tx(full, bytes);
          ptx::cp_async_bulk(ptx::shared_address(s_.stages[stage.at]), from, bytes, full);
        } else {
          ptx::mbarrier_arrive(full);
        }
      }
      stage.next(C::kStages);
    }
  }

  // Of an item's activations, from x: a lane brings 16 bytes of a row for a stage. Rows of odd numbers are the second
  // warp's. A stage is given on kLag stages later, so that the way from memory is not waited for.
  __device__ void stage_rows(const Item& item, int part, Ring& stage) {
    namespace ptx = kernel_core::ptx;
    static_assert(C::kStages > 2);
    constexpr int kRows = C::kColumns / 2, kLag = C::kStages > 6 ? 4 : C::kStages > 3 ? 2 : 1;
    const bool shared = s_.plan.has_shared && item.ordinal == 0;
    const int columns = step_columns(format_of(item.ordinal)) * C::kSteps, turns = p_.d / columns;
    uint64_t mine = 0;
    if (lane_ < item.rows) {
      const int at = item.first_row + lane_;
      const RankRow from = shared ? RankRow{p_.ranks.rank, at * p_.slots} : rank_row(p_.ranks, p_.rows[at]);
      mine = reinterpret_cast<uint64_t>(static_cast<const uint16_t*>(p_.ranks.x[from.rank]) +
                                        static_cast<int64_t>(from.row / p_.slots) * p_.d);
    }
    const uint16_t* row[kRows];
    MEGA_MOE_UNROLL
    for (int j = 0; j < kRows; ++j)
      row[j] = reinterpret_cast<const uint16_t*>(__shfl_sync(0xFFFFFFFFu, mine, part + 2 * j)) + lane_ * 8;
    mark(p_, kRowsFound, lane_ == 0 && part == 0 && stage.at == 0 && stage.parity == 0);
    const bool inside = lane_ * 8 < columns;
    Ring behind = stage;
    MEGA_MOE_NO_UNROLL
    for (int i = 0; i < turns; ++i) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.empty[stage.at]), stage.parity ^ 1);
      const uint32_t to = ptx::shared_address(s_.stages[stage.at]);
      MEGA_MOE_UNROLL
      for (int j = 0; j < kRows; ++j) {
        const int r = part + 2 * j;
        if (inside && r < item.rows)
          ptx::cp_async_16(to + static_cast<uint32_t>(image_offset(item.columns, r, lane_ * 16)),
                           row[j] + static_cast<int64_t>(i) * columns);
      }
      ptx::cp_async_commit();
      stage.next(C::kStages);
      if (i >= kLag) {
        ptx::cp_async_wait<kLag>();
        give_on(behind);
      }
    }
    ptx::cp_async_wait<0>();
    for (int i = turns < kLag ? turns : kLag; i > 0; --i) give_on(behind);
  }

  // A warp's copies to a stage have landed.
  __device__ void give_on(Ring& stage) const {
    kernel_core::ptx::fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) kernel_core::ptx::mbarrier_arrive(kernel_core::ptx::shared_address(&s_.full[stage.at]));
    stage.next(C::kStages);
  }

  __device__ Format format_of(int ordinal) const {
    return s_.plan.has_shared && ordinal == 0 ? static_cast<Format>(p_.shared_format) : Format::mxfp4;
  }
  __device__ const uint8_t* weight_of(const Item& item) const {
    const bool first = item.kind == Kind::first;
    if (s_.plan.has_shared && item.ordinal == 0) return first ? p_.shared13 : p_.shared2;
    const int ordinal = item.ordinal - s_.plan.has_shared, expert = p_.places ? p_.places[ordinal] : ordinal;
    const int64_t bytes =
        first ? weight_bytes(Format::mxfp4, 2 * p_.inter, p_.d) : weight_bytes(Format::mxfp4, p_.d, p_.inter);
    return (first ? p_.w13 : p_.w2) + expert * bytes;
  }

  const ExpertsParams& p_;
  ExpertShared<C>& s_;
  const int lane_;
};

}  // namespace mega_moe::sm90
