// One thread block selects from one row (or one slice of a row).
//
// A sample of the row gives a threshold that somewhat more than k entries reach. The row then runs through shared
// memory, three tiles on their way while one is looked at, and what reaches the threshold goes to a list; no thread
// waits for another. The list's k best are found by one or two histograms of their keys, and their positions sorted by
// a bitmap of the row. Entries carry their index, so the order in which they arrive cannot show.
//
// Where very many entries have the score that would be the threshold, only the first of them are let in. Where the
// threshold was wrong (fewer than k entries, or more than the list holds), and for short rows: see scan().
#pragma once

#include "kernel_core/cuda/ptx.cuh"
#include "topk_config.cuh"
#include "unroll.cuh"

namespace mla_fp4::sm90 {

template <typename C>
class Topk {
 public:
  __device__ Topk(TopkShared<C>& shared, int k) : s_(shared), k_(k), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {}

  // The positions of the k best, ascending, in s.sorted; returns their number.
  __device__ int run(TopkRow row) {
    const int count = row.length < k_ ? row.length : k_;
    if (row.length <= k_) {
      for (int i = threadIdx.x; i < count; i += C::kThreads) s_.sorted[i] = i;
      __syncthreads();
      return count;
    }
    if (count == 0) return 0;
    length_ = row.length;
    for (int i = threadIdx.x; i < plan::kBins; i += C::kThreads) s_.bins[i] = 0;
    if (threadIdx.x < 3) s_.arrivals[threadIdx.x] = 0;
    if (row.length <= C::kCapacity || !stream(row)) scan(row);
    sort(held_ > k_);
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
      kernel_core::ptx::cp_async_16(kernel_core::ptx::shared_address(&s_.coming[tile % C::kStages][v][threadIdx.x]),
                                    valid ? row.scores + index : row.scores, valid);
    }
    kernel_core::ptx::cp_async_commit();
  }

  // ---- one pass with a threshold from a sample -------------------------------------------------------------------

  // False where that did not find between k and kCapacity entries.
  __device__ bool stream(TopkRow row) {
    const int tiles = (row.length + C::kTile - 1) / C::kTile;
    const Sample found = sample(row);                  // asks for the first tiles
    const bool usable = found.lowest > plan::kLowest;  // else NaN, which no comparison finds, would have to compete
    const float threshold = usable ? plan::key_score(found.lowest) : 0;
    const uint32_t bound = usable && found.common ? first_equals(row, threshold) : length_;
    MLA_FP4_NO_UNROLL
    for (int tile = 0; usable && tile < tiles; ++tile) {
      kernel_core::ptx::cp_async_wait<C::kStages - 2>();
      request(row, tile + C::kStages - 1);
      uint32_t wanted = 0;
      MLA_FP4_UNROLL
      for (int v = 0; v < C::kVectors; ++v) {
        const float4 x = s_.coming[tile % C::kStages][v][threadIdx.x];
        wanted |= (x.x >= threshold ? 1u : 0) << (4 * v) | (x.y >= threshold ? 2u : 0) << (4 * v) |
                  (x.z >= threshold ? 4u : 0) << (4 * v) | (x.w >= threshold ? 8u : 0) << (4 * v);
      }
      if (static_cast<uint32_t>(tile + 1) * C::kTile > bound) wanted &= within(tile, threshold, bound);
      tile_ = tile;
      append(&s_.arrivals[0], 0, wanted);
    }
    kernel_core::ptx::cp_async_wait<0>();
    __syncthreads();
    held_ = s_.arrivals[0];
    if (usable && held_ >= k_ && held_ <= C::kCapacity) return true;
    __syncthreads();
    if (threadIdx.x == 0) s_.arrivals[0] = 0;
    held_ = 0;
    return false;
  }

  // Those of the thread's values of a tile that are in the row, and above the threshold or before `bound`.
  __device__ uint32_t within(int tile, float threshold, uint32_t bound) const {
    const float* const values = reinterpret_cast<const float*>(s_.coming[tile % C::kStages]);
    uint32_t mask = 0;
    MLA_FP4_NO_UNROLL
    for (int i = 0; i < C::kValues; ++i) {
      const uint32_t index = index_of(tile, i);
      if (index < length_ && (index < bound || values[index_of(0, i)] > threshold)) mask |= 1u << i;
    }
    return mask;
  }

  // Of a score that very many entries have, only the first k can count: an index that so many of them lie below, and
  // hardly more; the row's length where there are fewer.
  __device__ uint32_t first_equals(TopkRow row, float score) {
    int seen = 0;
    MLA_FP4_NO_UNROLL
    for (uint32_t first = 0; first < length_; first += 4 * C::kThreads) {
      const uint32_t index = first + threadIdx.x * 4;
      int count = 0;
      if (index < length_) {  // the whole vector is inside the row's stride
        const float4 x = *reinterpret_cast<const float4*>(row.scores + index);
        count = (x.x == score) + (index + 1 < length_ && x.y == score) + (index + 2 < length_ && x.z == score) +
                (index + 3 < length_ && x.w == score);
      }
      const int before = seen + before_thread(count);
      if (before < k_ && k_ <= before + count) s_.found[0] = static_cast<int>(index + 4);
      if (threadIdx.x == C::kThreads - 1) s_.found[1] = before + count;
      __syncthreads();
      seen = s_.found[1];
      if (seen >= k_) return min(static_cast<uint32_t>(s_.found[0]), length_);
    }
    return length_;
  }

  // A key that about sample_rank() of a sample reach; `common` where many more do, because very many are equal to it.
  struct Sample {
    uint32_t lowest;
    bool common;
  };

  // Reads before it asks for tiles: it would wait for all of their bytes.
  __device__ Sample sample(TopkRow row) {
    const int own = row.length > C::kManySamplesFrom ? C::kMostSamples : C::kSamples;
    const plan::SampleRank rank = plan::sample_rank(k_, own * C::kThreads, row.length, C::kCapacity);
    float scores[C::kMostSamples];
    MLA_FP4_UNROLL
    for (int i = 0; i < C::kMostSamples; ++i)
      if (i < own)
        scores[i] = row.scores[plan::sample_index(i * C::kThreads + threadIdx.x, own * C::kThreads, row.length)];
    MLA_FP4_NO_UNROLL
    for (int i = 0; i < C::kStages - 1; ++i) request(row, i);
    uint32_t keys[C::kMostSamples];
    uint32_t low = ~0u, high = 0;
    MLA_FP4_UNROLL
    for (int i = 0; i < C::kMostSamples; ++i) {
      if (i >= own) continue;
      keys[i] = plan::order_key(scores[i]);
      low = min(low, keys[i]), high = max(high, keys[i]);
    }
    plan::KeySteps steps = spread(low, high);
    int need = rank.wanted, most = rank.most;
    for (;;) {
      MLA_FP4_UNROLL
      for (int i = 0; i < C::kMostSamples; ++i)
        if (i < own && steps.counts(keys[i])) atomicAdd(&s_.bins[steps.bin(keys[i])], 1);
      locate(need);
      const int bin = s_.found[0], before = s_.found[1], count = s_.found[2];
      const bool common = before + count > most;
      if (!common || steps.shift == 0) return {steps.lowest(bin), common};
      need -= before, most -= before;
      steps = steps.inside(bin);
    }
  }

  // Steps over the keys of all threads.
  __device__ plan::KeySteps spread(uint32_t low, uint32_t high) {
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane_ == 0) s_.lowest[warp_] = low, s_.highest[warp_] = high;
    __syncthreads();
    const int from = lane_ < C::kThreads / 32 ? lane_ : 0;
    return plan::KeySteps::of(__reduce_min_sync(~0u, s_.lowest[from]), __reduce_max_sync(~0u, s_.highest[from]));
  }

  // Where the `need`-th of what has been counted in s.bins is: s.found. Leaves the bins empty.
  __device__ void locate(int need) {
    __syncthreads();
    int counts[kBinsOfThread], sum = 0;
    MLA_FP4_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      counts[i] = s_.bins[threadIdx.x * kBinsOfThread + i];
      s_.bins[threadIdx.x * kBinsOfThread + i] = 0;
      sum += counts[i];
    }
    int before = before_thread(sum);
    MLA_FP4_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      if (before < need && need <= before + counts[i]) {
        s_.found[0] = threadIdx.x * kBinsOfThread + i;
        s_.found[1] = before;
        s_.found[2] = counts[i];
      }
      before += counts[i];
    }
    __syncthreads();
  }

  // Sum of the values of the threads before this one.
  __device__ int before_thread(int value) {
    int end = value;
    MLA_FP4_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane_ >= step) end += other;
    }
    if (lane_ == 31) s_.warps[warp_] = end;
    __syncthreads();
    return __reduce_add_sync(~0u, lane_ < warp_ ? s_.warps[lane_] : 0) + end - value;
  }

  // Appends the tile's values in `wanted`, at list[first + *counter ...]; what does not fit is only counted.
  __device__ void append(int* counter, int first, uint32_t wanted) {
    if (!__any_sync(~0u, wanted)) return;
    const int mine = __popc(wanted);
    int end = mine;
    MLA_FP4_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane_ >= step) end += other;
    }
    int base = 0;
    if (lane_ == 31) base = atomicAdd(counter, end);
    int at = first + __shfl_sync(~0u, base, 31) + end - mine;
    const float* const tile = reinterpret_cast<const float*>(s_.coming[tile_ % C::kStages]);
    MLA_FP4_NO_UNROLL
    for (; wanted && at < C::kCapacity; wanted &= wanted - 1, ++at) {
      const int v = __ffs(wanted) - 1;
      const uint32_t index = index_of(0, v);  // also the value's place in the tile
      s_.list[at] = plan::ranked(plan::order_key(tile[index]), tile_ * C::kTile + index);
    }
  }

  // ---- any row: tile by tile, with cuts ----------------------------------------------------------------------------

  // Keys of four neighbours of the present tile; 0 where the row has ended.
  __device__ void keys_of(int v, uint32_t (&keys)[4]) const {
    const float4 from = s_.coming[tile_ % C::kStages][v][threadIdx.x];
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

  // What beats the threshold goes to the list. The first threshold is the k-th largest maximum of four neighbours of
  // the first tile: k entries reach it. When the list would overflow, a radix search over list and tile cuts both back
  // to the k best and raises the threshold.
  __device__ void scan(TopkRow row) {
    const int tiles = (row.length + C::kTile - 1) / C::kTile;
    request(row, 0);
    __syncthreads();
    MLA_FP4_NO_UNROLL
    for (int tile = 0; tile < tiles; ++tile) {
      tile_ = tile;
      kernel_core::ptx::cp_async_wait<0>();
      if (tile + 1 < tiles) request(row, tile + 1);
      if (tile == 0 && row.length > C::kCapacity && 2 * k_ <= C::kThreads * C::kVectors) first_threshold();
      uint32_t wanted = 0;
      for_admitted(admit_, [&](int v, uint64_t) { wanted |= 1u << v; });
      int* const arrivals = &s_.arrivals[tile % 3];
      append(arrivals, held_, wanted);
      __syncthreads();
      const int total = held_ + *arrivals;
      // Everyone read the slot of the tile before, before the barrier above.
      if (threadIdx.x == 0) s_.arrivals[(tile + 2) % 3] = 0;
      if (total > C::kCapacity)
        cut();
      else
        held_ = total;
    }
    __syncthreads();
  }

  // The k-th largest of what `visit` shows: visit(f) calls f(entry) for each entry of this thread. There are at least
  // k.
  template <typename Visit>
  __device__ plan::Bound search(int passes, Visit visit) {
    plan::Bound bound = plan::Bound::of(k_);
    MLA_FP4_NO_UNROLL
    while (!bound.done) {
      visit([&](uint64_t entry) {
        if (bound.counts(entry)) atomicAdd(&s_.bins[bound.bin(entry)], 1);
      });
      locate(bound.need);
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

  // Leaves the k best of the list and of the tile, which did not fit.
  __device__ void cut() {
    const plan::Bound bound = search(plan::kPasses, [&](auto&& see) {
      MLA_FP4_NO_UNROLL
      for (int i = threadIdx.x; i < held_; i += C::kThreads) see(s_.list[i]);
      for_admitted(admit_, [&](int, uint64_t entry) { see(entry); });
    });
    if (threadIdx.x == 0) s_.kept = 0;
    __syncthreads();
    // In place: what a round writes lands where all rounds so far have read.
    MLA_FP4_NO_UNROLL
    for (int first = 0; first < held_; first += C::kThreads) {
      const int i = first + threadIdx.x;
      const uint64_t entry = i < held_ ? s_.list[i] : 0;
      __syncthreads();
      const bool stays = i < held_ && bound.takes(entry);
      const uint32_t mask = __ballot_sync(~0u, stays);
      int base = 0;
      if (lane_ == 0 && mask) base = atomicAdd(&s_.kept, __popc(mask));
      base = __shfl_sync(~0u, base, 0);
      if (stays) s_.list[base + __popc(mask & ((1u << lane_) - 1))] = entry;
    }
    __syncthreads();
    uint32_t wanted = 0;
    for_admitted(admit_, [&](int v, uint64_t entry) { wanted |= bound.takes(entry) ? 1u << v : 0; });
    append(&s_.kept, 0, wanted);
    __syncthreads();
    held_ = k_;
    admit_ = bound.admits();
  }

  // ---- from the list to the positions ------------------------------------------------------------------------------

  // Where the k-th best of the list is; the list is longer.
  __device__ uint64_t cutoff() {
    uint32_t low = ~0u, high = 0;
    for (int i = threadIdx.x; i < held_; i += C::kThreads) {
      const uint32_t key = plan::rank_key(s_.list[i]);
      low = min(low, key), high = max(high, key);
    }
    if (threadIdx.x == 0) s_.kept = 0;
    plan::KeySteps steps = spread(low, high);
    int need = k_;
    for (;;) {
      for (int i = threadIdx.x; i < held_; i += C::kThreads) {
        const uint32_t key = plan::rank_key(s_.list[i]);
        if (steps.counts(key)) atomicAdd(&s_.bins[steps.bin(key)], 1);
      }
      locate(need);
      const int bin = s_.found[0], count = s_.found[2];
      need -= s_.found[1];
      if (count == need) return plan::ranked(steps.lowest(bin), plan::kIndexMask);
      if (count <= C::kTies) return cutoff_of_ties(steps, bin, need);
      if (steps.shift == 0) break;  // many of one key
      steps = steps.inside(bin);
    }
    return search(plan::kPasses,
                  [&](auto&& see) {
                    MLA_FP4_NO_UNROLL
                    for (int i = threadIdx.x; i < held_; i += C::kThreads) see(s_.list[i]);
                  })
        .prefix;
  }

  // The `need`-th best entry of a bin with few.
  __device__ uint64_t cutoff_of_ties(plan::KeySteps steps, int bin, int need) {
    for (int i = threadIdx.x; i < held_; i += C::kThreads) {
      const uint64_t entry = s_.list[i];
      if (steps.counts(plan::rank_key(entry)) && steps.bin(plan::rank_key(entry)) == bin)
        s_.ties[atomicAdd(&s_.kept, 1)] = entry;
    }
    __syncthreads();
    const int count = s_.kept;
    if (static_cast<int>(threadIdx.x) < count) {
      const uint64_t own = s_.ties[threadIdx.x];
      int better = 0;
      MLA_FP4_NO_UNROLL
      for (int i = 0; i < count; ++i) better += s_.ties[i] > own;
      if (better == need - 1) s_.cutoff = own;
    }
    __syncthreads();
    return s_.cutoff;
  }

  // A bit for each position of the row; a thread counts and lists those of neighbouring words.
  __device__ void sort(bool longer) {
    uint32_t* const bits = reinterpret_cast<uint32_t*>(s_.coming);
    const int words = static_cast<int>(length_ + 31) / 32;
    for (int i = threadIdx.x; i < words; i += C::kThreads) bits[i] = 0;
    uint64_t least = 0;
    if (longer)
      least = cutoff();
    else
      __syncthreads();
    for (int i = threadIdx.x; i < held_; i += C::kThreads) {
      const uint64_t entry = s_.list[i];
      if (entry >= least) atomicOr(&bits[plan::rank_index(entry) / 32], 1u << plan::rank_index(entry) % 32);
    }
    __syncthreads();
    const int own = (words + C::kThreads - 1) / C::kThreads;
    const int first = min(static_cast<int>(threadIdx.x) * own, words), end = min(first + own, words);
    int count = 0;
    for (int i = first; i < end; ++i) count += __popc(bits[i]);
    int at = before_thread(count);
    for (int i = first; count > 0 && i < end; ++i)
      for (uint32_t word = bits[i]; word; word &= word - 1) s_.sorted[at++] = i * 32 + __ffs(word) - 1;
    __syncthreads();
  }

  TopkShared<C>& s_;
  const int k_, lane_, warp_;
  uint32_t length_ = 0;
  int tile_ = 0;
  int held_ = 0;        // entries of the list, the same in all threads
  uint32_t admit_ = 0;  // the lowest key that still counts
};

}  // namespace mla_fp4::sm90
