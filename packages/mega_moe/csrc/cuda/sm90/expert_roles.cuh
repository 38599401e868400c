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
        ptx::mbarrier_arrive_expect_tx(full, C::kBlocks * bytes);
        MEGA_MOE_UNROLL
        for (int b = 0; b < C::kBlocks; ++b) ptx::cp_async_bulk(to + b * C::kBlockBytes, from + b * block, bytes, full);
        stage.next(C::kStages);
      }
    }
  }

  // Asks for the activations of the items' steps, once they are there. One lane.
  __device__ void images() {
    namespace ptx = kernel_core::ptx;
    if (lane_ != 0) return;
    Ring slot, stage;
    bool gathered = !(p_.parts_of_work & kGather);
    const bool fused = (p_.parts_of_work & kFirst) != 0;  // else an earlier launch made the hidden rows
    for (;; slot.next(kSlots)) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.known[slot.at]), slot.parity);
      const Item item = s_.slots[slot.at].item;
      if (item.kind == Kind::end) return;
      if (item.kind == Kind::first && !gathered) {
        wait_for_count(p_.state, kGathered, static_cast<int>(gridDim.x));
        gathered = true;
      }
      if (item.kind == Kind::second && fused) wait_for_count(p_.state, kTileDone + item.tile, s_.plan.blocks1);
      fence_proxy_async_all();
      const int columns = step_columns(format_of(item.ordinal)) * C::kSteps;
      const int width = item.kind == Kind::first ? p_.d : p_.inter;
      const auto bytes = static_cast<uint32_t>(C::stage_image_bytes(item.columns, columns));
      const uint8_t* from = (item.kind == Kind::first ? p_.images : p_.hidden) +
                            static_cast<int64_t>(item.image_row) * C::row_bytes(width);
      MEGA_MOE_NO_UNROLL
      for (int i = 0; i < width / columns; ++i, from += bytes) {
        ptx::mbarrier_wait(ptx::shared_address(&s_.empty[stage.at]), stage.parity ^ 1);
        const uint32_t full = ptx::shared_address(&s_.full[stage.at]);
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        ptx::cp_async_bulk(ptx::shared_address(s_.stages[stage.at]), from, bytes, full);
        stage.next(C::kStages);
      }
      ptx::mbarrier_arrive(ptx::shared_address(&s_.finished[slot.at]));
    }
  }

  // Looks up the rows of items. One warp.
  __device__ void rows() {
    namespace ptx = kernel_core::ptx;
    Ring slot;
    for (;; slot.next(kSlots)) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.known[slot.at]), slot.parity);
      ItemSlot& its = s_.slots[slot.at];
      if (its.item.kind == Kind::end) return;
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
        ptx::mbarrier_arrive(ptx::shared_address(&s_.finished[slot.at]));
      }
    }
  }

 private:
  __device__ Format format_of(int ordinal) const {
    return s_.plan.has_shared && ordinal == 0 ? static_cast<Format>(p_.shared_format) : Format::mxfp4;
  }
  __device__ const uint8_t* weight_of(const Item& item) const {
    const bool first = item.kind == Kind::first;
    if (s_.plan.has_shared && item.ordinal == 0) return first ? p_.shared13 : p_.shared2;
    const int expert = item.ordinal - s_.plan.has_shared;
    const int64_t bytes =
        first ? weight_bytes(Format::mxfp4, 2 * p_.inter, p_.d) : weight_bytes(Format::mxfp4, p_.d, p_.inter);
    return (first ? p_.w13 : p_.w2) + expert * bytes;
  }

  const ExpertsParams& p_;
  ExpertShared<C>& s_;
  const int lane_;
};

}  // namespace mega_moe::sm90
