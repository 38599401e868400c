// The selection kernel's walk over a row, in its order of decisions, with the tile's threads in a given order.
#include "topk_plan.cuh"

#include <algorithm>
#include <vector>

namespace plan = mla_fp4::topk_plan;

namespace {

using Entries = std::vector<uint64_t>;

plan::Bound search(const Entries& entries, int k, int passes) {
  plan::Bound bound = plan::Bound::of(k);
  while (!bound.done) {
    std::vector<int> bins(plan::kBins);
    for (uint64_t e : entries)
      if (bound.counts(e)) ++bins[bound.bin(e)];
    int before = 0;
    uint32_t bin = 0;
    while (before + bins[bin] < bound.need) before += bins[bin++];
    bound.advance(bin, before, bins[bin], passes);
  }
  return bound;
}

}  // namespace

extern "C" {

uint32_t order_key(float score) { return plan::order_key(score); }
int64_t merged_length(int64_t length, int64_t slice, int64_t k) { return plan::merged_length(length, slice, k); }
int64_t candidate_length(int64_t count, int64_t last, int64_t block, int64_t visible) {
  return plan::candidate_length(count, last, block, visible);
}
float key_score(uint32_t key) { return plan::key_score(key); }
uint32_t sample_index(uint32_t i, uint32_t count, uint32_t length) { return plan::sample_index(i, count, length); }
void sample_rank(int64_t k, int64_t count, int64_t length, int64_t capacity, int* out) {
  const plan::SampleRank rank = plan::sample_rank(k, count, length, capacity);
  out[0] = rank.wanted, out[1] = rank.most;
}

// Narrows [low, high] to the key `wanted` by steps; returns how often, or -1 where a step lost it or its place.
int narrow(uint32_t low, uint32_t high, uint32_t wanted) {
  plan::KeySteps steps = plan::KeySteps::of(low, high);
  if (!steps.counts(low) || !steps.counts(high)) return -1;
  for (int rounds = 1;; ++rounds) {
    if (!steps.counts(wanted)) return -1;
    const int bin = steps.bin(wanted);
    if (bin < 0 || bin >= plan::kBins || steps.lowest(bin) > wanted) return -1;
    if (steps.shift == 0) return steps.lowest(bin) == wanted ? rounds : -1;
    const plan::KeySteps inner = steps.inside(bin);
    const uint64_t end = static_cast<uint64_t>(steps.lowest(bin)) + (uint64_t{1} << steps.shift);  // of the bin
    if (inner.counts(steps.lowest(bin) - 1) || (end <= 0xFFFFFFFF && inner.counts(static_cast<uint32_t>(end))))
      return -1;
    if (!inner.counts(static_cast<uint32_t>(end - 1))) return -1;
    steps = inner;
  }
}

// Writes the positions of the k best, ascending; returns their number, or -1 where the walk broke its own rules.
// cuts[0] counts the cuts that included a tile. `backwards`: threads arrive in the reverse order.
int select_row(const float* scores, int length, int k, int tile_size, int capacity, bool backwards, int32_t* out,
               int* cuts) {
  *cuts = 0;
  const int count = std::min(length, k);
  if (length <= k) {
    for (int i = 0; i < count; ++i) out[i] = i;
    return count;
  }
  Entries list;
  uint32_t admit = 0;
  for (int first = 0; first < length; first += tile_size) {
    const int end = std::min(first + tile_size, length);
    if (first == 0 && 2 * k <= tile_size / 4) {
      Entries tops;
      for (int group = 0; group < tile_size; group += 4) {
        uint32_t top = 0;
        for (int i = group; i < std::min(group + 4, end); ++i) top = std::max(top, plan::order_key(scores[i]));
        tops.push_back(plan::ranked(top, 0));
      }
      admit = plan::rank_key(search(tops, k, plan::kKeyPasses).prefix);
    }
    Entries tile;
    for (int i = first; i < end; ++i)
      if (plan::order_key(scores[i]) >= admit) tile.push_back(plan::ranked(plan::order_key(scores[i]), i));
    if (backwards) std::reverse(tile.begin(), tile.end());
    list.insert(list.end(), tile.begin(), tile.end());
    if (static_cast<int>(list.size()) <= capacity) continue;
    ++*cuts;
    const plan::Bound bound = search(list, k, plan::kPasses);
    std::erase_if(list, [&](uint64_t e) { return !bound.takes(e); });
    if (static_cast<int>(list.size()) != k || bound.admits() < admit) return -1;
    admit = bound.admits();
  }
  if (static_cast<int>(list.size()) > k) {
    const plan::Bound bound = search(list, k, plan::kPasses);
    std::erase_if(list, [&](uint64_t e) { return !bound.takes(e); });
  }
  if (static_cast<int>(list.size()) != k) return -1;
  for (int i = 0; i < k; ++i) out[i] = static_cast<int32_t>(plan::rank_index(list[i]));
  std::sort(out, out + k);
  return k;
}
}
