// One thread block selects from one row (or one slice of a row) and reads it once.
//
// A tile of the row stands in shared memory while the next is on its way there. What beats the threshold goes to
// a list there. The first threshold is the k-th largest maximum of four neighbours: k entries of the tile reach it, and
// a search among the maxima has a quarter of the histogram traffic. When the list would overflow, a radix search over
// list and tile cuts both back to the k best and raises the threshold. Entries of the list carry their index, so the
// threads' order of arrival cannot show.
#pragma once

#include "kernel_core/cuda/ptx.cuh"
#include "topk_plan.cuh"
#include "unroll.cuh"

namespace mla_fp4::sm90 {

namespace plan = topk_plan;

template <int kMaxK_, int kCapacity_>
struct TopkConfig {
  static constexpr int kMaxK = kMaxK_;
  static constexpr int kCapacity = kCapacity_;
  static constexpr int kThreads = 512;
  static constexpr int kVectors = 4;  // 16-byte loads of a thread and tile
  static constexpr int kValues = 4 * kVectors;
  static constexpr int kTile = kThreads * kValues;
  static_assert(kCapacity >= 2 * kMaxK && kCapacity % kThreads == 0, "a cut has to make room");
};

template <typename C>
struct TopkShared {
  float4 coming[2][C::kVectors][C::kThreads];  // each thread reads what it has copied itself
  uint64_t list[C::kCapacity];
  int32_t chosen[C::kMaxK], sorted[C::kMaxK];
  int bins[plan::kBins];
  int warps[C::kThreads / 32];
  int found[3];     // bin, entries before it, entries in it
  int arrivals[3];  // of tile i in slot i % 3
  int kept;
};

struct TopkRow {
  const float* scores;
  int length;
};

template <typename C>
class Topk {
 public:
  __device__ Topk(TopkShared<C>& shared, int k) : s_(shared), k_(k) {}

  // The positions of the k best, ascending, in s.sorted; returns their number.
  __device__ int run(TopkRow row) {
    const int count = row.length < k_ ? row.length : k_;
    if (row.length <= k_) {
      for (int i = threadIdx.x; i < count; i += C::kThreads) s_.sorted[i] = i;
      __syncthreads();
      return count;
    }
    if (count == 0) return 0;
    scan(row);
    if (held_ > k_) cut(false);
    for (int i = threadIdx.x; i < k_; i += C::kThreads)
      s_.chosen[i] = static_cast<int32_t>(plan::rank_index(s_.list[i]));
    __syncthreads();
    sort_positions(row.length);
    return count;
  }

 private:
  static constexpr int kBinsOfThread = plan::kBins / C::kThreads;

  __device__ static uint32_t index_of(int tile, int value) {
    return tile * C::kTile + value / 4 * (4 * C::kThreads) + threadIdx.x * 4 + value % 4;
  }

  // Asks for a tile. The whole vector that holds the last entry is inside the row's stride.
  __device__ void request(TopkRow row, int tile) {
    MLA_FP4_UNROLL
    for (int v = 0; v < C::kVectors; ++v) {
      const uint32_t index = index_of(tile, 4 * v);
      const bool valid = index < static_cast<uint32_t>(row.length);
      kernel_core::ptx::cp_async_16(kernel_core::ptx::shared_address(&s_.coming[tile % 2][v][threadIdx.x]),
                                    valid ? row.scores + index : row.scores, valid);
    }
    kernel_core::ptx::cp_async_commit();
  }

  // Keys of four neighbours of the present tile; 0 where the row has ended.
  __device__ void keys_of(int v, uint32_t (&keys)[4]) const {
    const float4 from = s_.coming[tile_ % 2][v][threadIdx.x];
    const float values[4] = {from.x, from.y, from.z, from.w};
    MLA_FP4_UNROLL
    for (int e = 0; e < 4; ++e) keys[e] = index_of(tile_, 4 * v + e) < length_ ? plan::order_key(values[e]) : 0;
  }

  // f(value, entry) for those of the thread's values that can count. Not unrolled: rare, and registers are few.
  template <typename F>
  __device__ void for_admitted(uint32_t admit, F f) const {
    MLA_FP4_NO_UNROLL
    for (int v = 0; v < C::kVectors; ++v) {
      uint32_t keys[4];
      keys_of(v, keys);
      MLA_FP4_UNROLL
      for (int e = 0; e < 4; ++e)
        if (keys[e] != 0 && keys[e] >= admit) f(4 * v + e, plan::ranked(keys[e], index_of(tile_, 4 * v + e)));
    }
  }

  __device__ void scan(TopkRow row) {
    if (threadIdx.x < 3) s_.arrivals[threadIdx.x] = 0;
    const int tiles = (row.length + C::kTile - 1) / C::kTile;
    request(row, 0);
    __syncthreads();
    length_ = row.length;
    for (int tile = 0; tile < tiles; ++tile) {
      tile_ = tile;
      kernel_core::ptx::cp_async_wait<0>();
      if (tile + 1 < tiles) request(row, tile + 1);
      if (tile == 0 && 2 * k_ <= C::kThreads * C::kVectors) first_threshold();
      uint32_t wanted = 0;
      MLA_FP4_UNROLL
      for (int v = 0; v < C::kVectors; ++v) {
        uint32_t keys[4];
        keys_of(v, keys);
        MLA_FP4_UNROLL
        for (int e = 0; e < 4; ++e) wanted |= keys[e] != 0 && keys[e] >= admit_ ? 1u << (4 * v + e) : 0;
      }
      int* const arrivals = &s_.arrivals[tile % 3];
      append(arrivals, held_, wanted);
      __syncthreads();
      const int total = held_ + *arrivals;
      // Everyone read the slot of the tile before, before the barrier above.
      if (threadIdx.x == 0) s_.arrivals[(tile + 2) % 3] = 0;
      if (total > C::kCapacity)
        cut(true);
      else
        held_ = total;
    }
    __syncthreads();
  }

  // Appends the tile's values in `wanted`, at list[first + *counter ...]; what does not fit is only counted.
  __device__ void append(int* counter, int first, uint32_t wanted) {
    if (!__any_sync(~0u, wanted)) return;
    const int mine = __popc(wanted), lane = threadIdx.x % 32;
    int end = mine;
    MLA_FP4_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    int base = 0;
    if (lane == 31) base = atomicAdd(counter, end);
    int at = first + __shfl_sync(~0u, base, 31) + end - mine;
    const float* const tile = reinterpret_cast<const float*>(s_.coming[tile_ % 2]);
    for (; wanted && at < C::kCapacity; wanted &= wanted - 1, ++at) {
      const int v = __ffs(wanted) - 1;
      const uint32_t index = index_of(0, v);  // also the value's place in the tile
      s_.list[at] = plan::ranked(plan::order_key(tile[index]), tile_ * C::kTile + index);
    }
  }

  // Exclusive prefix sums of the bins in place; each thread holds the counts of its own bins from before.
  __device__ void sum_bins(int (&counts)[kBinsOfThread], int (&before)[kBinsOfThread]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = 0;
    MLA_FP4_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      counts[i] = s_.bins[threadIdx.x * kBinsOfThread + i];
      before[i] = sum;
      sum += counts[i];
    }
    int end = sum;
    MLA_FP4_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    if (lane == 31) s_.warps[warp] = end;
    __syncthreads();
    int first = end - sum;
    for (int w = 0; w < C::kThreads / 32; ++w) first += w < warp ? s_.warps[w] : 0;
    MLA_FP4_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) before[i] += first;
  }

  __device__ void clear_bins() {
    for (int i = threadIdx.x; i < plan::kBins; i += C::kThreads) s_.bins[i] = 0;
    __syncthreads();
  }

  // The k-th largest of what `visit` shows: visit(f) calls f(entry) for each entry of this thread. There are at least
  // k.
  template <typename Visit>
  __device__ plan::Bound search(int passes, Visit visit) {
    plan::Bound bound = plan::Bound::of(k_);
    while (!bound.done) {
      clear_bins();
      visit([&](uint64_t entry) {
        if (bound.counts(entry)) atomicAdd(&s_.bins[bound.bin(entry)], 1);
      });
      __syncthreads();
      int counts[kBinsOfThread], before[kBinsOfThread];
      sum_bins(counts, before);
      MLA_FP4_UNROLL
      for (int i = 0; i < kBinsOfThread; ++i) {
        if (before[i] < bound.need && bound.need <= before[i] + counts[i]) {
          s_.found[0] = threadIdx.x * kBinsOfThread + i;
          s_.found[1] = before[i];
          s_.found[2] = counts[i];
        }
      }
      __syncthreads();
      bound.advance(s_.found[0], s_.found[1], s_.found[2], passes);
    }
    return bound;
  }

  __device__ void first_threshold() {
    const plan::Bound bound = search(plan::kKeyPasses, [&](auto&& see) {
      MLA_FP4_NO_UNROLL
      for (int v = 0; v < C::kVectors; ++v) {
        uint32_t keys[4];
        keys_of(v, keys);
        see(plan::ranked(max(max(keys[0], keys[1]), max(keys[2], keys[3])), 0));
      }
    });
    admit_ = plan::rank_key(bound.prefix);  // 0 where fewer than k groups have an entry: all come in
  }

  // Leaves the k best of the list, and of the tile where it did not fit.
  __device__ void cut(bool with_tile) {
    const plan::Bound bound = search(plan::kPasses, [&](auto&& see) {
      for (int i = threadIdx.x; i < held_; i += C::kThreads) see(s_.list[i]);
      if (with_tile) for_admitted(admit_, [&](int, uint64_t entry) { see(entry); });
    });
    if (threadIdx.x == 0) s_.kept = 0;
    __syncthreads();
    // In place: what a round writes lands where all rounds so far have read.
    for (int first = 0; first < held_; first += C::kThreads) {
      const int i = first + threadIdx.x;
      const uint64_t entry = i < held_ ? s_.list[i] : 0;
      __syncthreads();
      const bool stays = i < held_ && bound.takes(entry);
      const uint32_t mask = __ballot_sync(~0u, stays);
      int base = 0;
      if (threadIdx.x % 32 == 0 && mask) base = atomicAdd(&s_.kept, __popc(mask));
      base = __shfl_sync(~0u, base, 0);
      if (stays) s_.list[base + __popc(mask & ((1u << threadIdx.x % 32) - 1))] = entry;
    }
    __syncthreads();
    uint32_t wanted = 0;
    if (with_tile) for_admitted(admit_, [&](int v, uint64_t entry) { wanted |= bound.takes(entry) ? 1u << v : 0; });
    append(&s_.kept, 0, wanted);
    __syncthreads();
    held_ = k_;
    admit_ = bound.admits();
  }

  // Counting sort by the high bits of the position; inside a bin an entry's place is the number of smaller ones.
  __device__ void sort_positions(int length) {
    const int shift = plan::position_shift(length);
    clear_bins();
    for (int i = threadIdx.x; i < k_; i += C::kThreads) atomicAdd(&s_.bins[s_.chosen[i] >> shift], 1);
    __syncthreads();
    int counts[kBinsOfThread], before[kBinsOfThread];
    sum_bins(counts, before);
    MLA_FP4_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) s_.bins[threadIdx.x * kBinsOfThread + i] = before[i];
    __syncthreads();
    for (int i = threadIdx.x; i < k_; i += C::kThreads)
      s_.sorted[atomicAdd(&s_.bins[s_.chosen[i] >> shift], 1)] = s_.chosen[i];
    __syncthreads();
    int32_t own[C::kMaxK / C::kThreads];
    int place[C::kMaxK / C::kThreads];
    MLA_FP4_UNROLL
    for (int r = 0; r < C::kMaxK / C::kThreads; ++r) {
      const int i = r * C::kThreads + threadIdx.x;
      if (i >= k_) continue;
      own[r] = s_.sorted[i];
      const int bin = own[r] >> shift, end = s_.bins[bin];
      const int begin = bin ? s_.bins[bin - 1] : 0;
      place[r] = begin;
      for (int j = begin; j < end; ++j) place[r] += s_.sorted[j] < own[r];
    }
    __syncthreads();
    MLA_FP4_UNROLL
    for (int r = 0; r < C::kMaxK / C::kThreads; ++r)
      if (r * C::kThreads + static_cast<int>(threadIdx.x) < k_) s_.sorted[place[r]] = own[r];
    __syncthreads();
  }

  TopkShared<C>& s_;
  const int k_;
  uint32_t length_ = 0;
  int tile_ = 0;
  int held_ = 0;        // entries of the list, the same in all threads
  uint32_t admit_ = 0;  // the lowest key that still counts
};

}  // namespace mla_fp4::sm90
