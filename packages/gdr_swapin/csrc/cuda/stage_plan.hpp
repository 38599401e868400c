// Spans of blocks through a ring of staging parts: which copies, on which stream, behind which event.
//
// Plain arithmetic over a `Queue`, which is a GPU's streams in the module and a recorder in tests. Copies of a round go
// out before the next round is planned, so the engines start with the first few blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdr_swapin::cuda {

// Larger batches were seen to go wrong, see copies.hpp.
inline constexpr int64_t kMostPerCall = 256;

struct StagePlan {
  uint64_t source;       // byte `offset` of block 0 at rest is `source + offset`
  uint64_t stride;       // bytes from block to block at rest
  const int64_t* slots;  // blocks at rest; neighbours that stand side by side travel as one
  int64_t count;
  uint64_t offset, size;      // the span of a block
  uint64_t area, part_bytes;  // the ring of staging parts
  int64_t parts, part;        // of the ring, and the one to start with
  int64_t first;              // blocks of the first round; each later one half as many again, up to `round_blocks`
  int64_t per_call;           // copies of one batched call
  int64_t regular_from;       // neighbours a stride apart that are worth one strided copy; 0: never
  int64_t streams, stream;    // rounds take turns on them, from `stream` on
};

// Blocks of a full round: what a part holds, in full calls where it holds one.
inline int64_t round_blocks(const StagePlan& p) {
  const int64_t fits = static_cast<int64_t>(p.part_bytes / p.size);
  return fits > p.per_call ? fits / p.per_call * p.per_call : fits;
}

// Whether the numbers make sense; the caller vouches for addresses.
inline bool sound(const StagePlan& p) {
  return p.slots && p.count >= 0 && p.size > 0 && p.offset + p.size <= p.stride && p.part_bytes >= p.size &&
         p.parts >= 2 && p.part >= 0 && p.part < p.parts && p.first >= 1 && p.per_call >= 1 &&
         p.per_call <= kMostPerCall && p.regular_from >= 0 && p.streams >= 1 && p.stream >= 0 && p.stream < p.streams;
}

// A Queue's calls return 0, or an error that ends the run:
//   before(stream, part)        the stream waits until the part was emptied
//   copy(stream, to, from, sizes, n), rows(stream, to, to_pitch, from, from_pitch, width, n)
//   after(stream, part)         the kernel's stream waits for the copies
//   deal(part, at, start, n)    the kernel: blocks `start` to `start + n` from address `at`; then the part is empty
// `*rounds`: how many were begun, one part and one turn of the streams each.
template <typename Queue>
int run_stage(const StagePlan& p, Queue& queue, int64_t* rounds) {
  *rounds = 0;
  const int64_t most = round_blocks(p);
  int64_t wanted = std::min(p.first, most);
  std::vector<uint64_t> to, from, sizes;
  const auto send = [&](int64_t stream) {
    for (size_t at = 0; at < to.size(); at += static_cast<size_t>(p.per_call)) {
      const int64_t n = std::min(p.per_call, static_cast<int64_t>(to.size() - at));
      if (const int error = queue.copy(stream, to.data() + at, from.data() + at, sizes.data() + at, n)) return error;
    }
    return 0;
  };
  // Queueing a block takes about half as long as moving it, and a round some 10 us beside: steps of a half keep ahead.
  for (int64_t start = 0; start < p.count; wanted = std::min(wanted + (wanted + 1) / 2, most)) {
    const int64_t n = std::min(wanted, p.count - start), round = (*rounds)++;
    const int64_t part = (p.part + round) % p.parts, stream = (p.stream + round) % p.streams;
    const uint64_t target = p.area + static_cast<uint64_t>(part) * p.part_bytes;
    const int64_t* slots = p.slots + start;
    if (const int error = queue.before(stream, part)) return error;
    to.clear(), from.clear(), sizes.clear();
    for (int64_t i = 0, run; i < n; i += run) {
      for (run = 1; i + run < n && slots[i + run] == slots[i] + run;) ++run;
      const uint64_t at = target + static_cast<uint64_t>(i) * p.size;
      const uint64_t source = p.source + p.offset + static_cast<uint64_t>(slots[i]) * p.stride;
      if (p.stride == p.size) {
        to.push_back(at), from.push_back(source), sizes.push_back(static_cast<uint64_t>(run) * p.size);
      } else if (p.regular_from && run >= p.regular_from) {
        if (const int error = queue.rows(stream, at, p.size, source, p.stride, p.size, static_cast<uint64_t>(run)))
          return error;
      } else {
        for (int64_t j = 0; j < run; ++j) {
          const uint64_t k = static_cast<uint64_t>(j);
          to.push_back(at + k * p.size), from.push_back(source + k * p.stride), sizes.push_back(p.size);
        }
      }
    }
    if (const int error = send(stream)) return error;
    if (const int error = queue.after(stream, part)) return error;
    if (const int error = queue.deal(part, target, start, n)) return error;
    start += n;
  }
  return 0;
}

}  // namespace gdr_swapin::cuda
