// Memory of one rank that its peers reach, zeros at first. Each field says who writes it.
//
// Nothing is cleared between collectives: flags and counts carry the epoch. A field is written again only when nobody
// reads its old content any more: a dispatch follows a combine (or a barrier), a combine follows a dispatch (or a
// barrier), so that the flags of the collective between say it; two of a kind in a row meet first (`entered`).
#pragma once

#include "include/ep_comm/layout.hpp"

namespace ep_comm::cuda {

constexpr int32_t kMostRanks = 64;  // a set of ranks is one 64-bit word
constexpr int32_t kMostSlots = 32;  // a token's slots lie in one warp

struct Control {
  // The rank's own, between its launches.
  uint64_t epoch;   // of the latest collective
  int32_t last;     // its Kind
  int32_t broken;   // 1 after the first failure: nothing is sent or waited for any more
  int32_t arrived;  // CTAs of the launch under way that have sent everything
  int32_t unused[11];
  // By peers: word r by rank r.
  uint64_t posted[kMostRanks];   // stamp of the latest collective, all of whose data for this rank lie ready
  uint64_t entered[kMostRanks];  // epoch of the latest collective that had to wait for everybody first
  uint64_t counts[kMostRanks];   // stamped: rows for this rank
  uint64_t ended;                // by whoever fails or gives up, see `Ended`
};

// Why a peer stopped: rank in the upper bits.
enum class Ended : uint64_t { no = 0, aborted = 1, closed = 2, timed_out = 3, mismatched = 4 };
EP_COMM_BOTH uint64_t ended_word(Ended why, int32_t rank) {
  return static_cast<uint64_t>(why) | static_cast<uint64_t>(rank) << 8;
}

// Byte offsets in a region, and its size. Regions with fixed rows hold what a fixed dispatch gives; those with packed
// rows hold the rank's own records, which peers fetch, and which of their records peers have for this rank.
struct Region {
  int64_t sent_ids;                          // int32 [max_tokens, top_k], the rank's own: the way home
  int64_t x, scales, ids, weights, sources;  // fixed: [ranks * max_tokens], by peers
  int64_t records;                           // packed: [max_tokens] by the rank itself
  int64_t lists;                             // packed: int32 [ranks, max_tokens], row r by rank r: tokens there
  int64_t results;                           // [max_tokens, top_k] rows, by peers
  int64_t bytes;
};

inline Region region_of(const Shape& s, bool fixed, bool packed) {
  constexpr int64_t kAlign = 128;
  const int64_t rows = fixed ? int64_t{s.ranks} * s.max_tokens : 0;
  const int64_t groups = s.dispatch == Format::fp8 ? s.hidden / kGroup : 0;
  int64_t end = align_up(sizeof(Control), kAlign);
  const auto take = [&](int64_t bytes) {
    const int64_t begin = end;
    end = align_up(end + bytes, kAlign);
    return begin;
  };
  Region at{};
  at.sent_ids = take(int64_t{4} * s.max_tokens * s.top_k);
  at.x = take(rows * s.hidden * element_bytes(s.dispatch));
  at.scales = take(rows * groups * 4);
  at.ids = take(rows * s.top_k * 4);
  at.weights = take(rows * s.top_k * 4);
  at.sources = take(rows * 4);
  at.records = take(packed ? s.max_tokens * record_of(s).bytes : 0);
  at.lists = take(packed ? int64_t{4} * s.ranks * s.max_tokens : 0);
  at.results = take(int64_t{s.max_tokens} * s.top_k * result_bytes(s));
  at.bytes = end;
  return at;
}

}  // namespace ep_comm::cuda
