// Memory that all ranks of a host see. Zeros at first; each field says who writes it.
//
//   Header | Member[ranks] | for each rank: counts, lists, records, results, gathered | Pair[source][target]
//
// A rank writes its tokens' records once into its own block and lists for each rank which of them it is to read: the
// buffer has max_tokens records whatever the number of ranks. Results go straight to their home.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>

#include "ep_comm/layout.hpp"

namespace ep_comm {

constexpr uint64_t kMagic = 0x3130'6d6d'6f63'7065;  // "epcomm01"
constexpr int kReason = 360;

enum class State : uint32_t { absent = 0, live = 1, closed = 2, aborted = 3 };

struct alignas(64) Header {
  uint64_t magic;  // with shape and bytes: by who makes the region, before others can open it
  int64_t bytes;
  Shape shape;
  std::atomic<uint32_t> joined;
};

// By its rank, except the bell, which others ring.
struct alignas(64) Member {
  std::atomic<uint64_t> posted;                // stamp of the latest collective whose data lie ready
  alignas(64) std::atomic<uint64_t> finished;  // epoch of the latest one that has been read
  std::atomic<uint32_t> state;
  std::atomic<int32_t> pid;
  uint64_t start_time;  // of the process: numbers of processes are used again
  uint64_t pid_space;   // numbers of processes say nothing in another one
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> awaited;  // 1 + the rank that it sleeps for, 0 awake
  alignas(64) char reason[kReason];
};

// One side of a transfer: the target asks for a tag, the source serves it, refuses another size, or drops it halfway.
enum class Wanted : uint64_t { free = 0, wanted = 1, served = 2, refused = 3, dropped = 4 };
constexpr int kWants = 64;
constexpr int kPieces = 4;

constexpr int kWantedBits = 3;
constexpr uint64_t kWantedMask = 7;

constexpr uint64_t want_state(uint64_t nonce, Wanted wanted) {
  return nonce << kWantedBits | static_cast<uint64_t>(wanted);
}

struct Want {
  std::atomic<uint64_t> state;  // nonce and Wanted
  std::atomic<int64_t> tag;
  std::atomic<int64_t> bytes;
};

struct Piece {
  uint64_t nonce;
  int64_t offset;
  int64_t bytes;
};

// Bytes from one rank to another: a ring of `kPieces` pieces behind it.
struct alignas(64) Pair {
  std::atomic<uint64_t> written;           // pieces, by the source
  alignas(64) std::atomic<uint64_t> read;  // by the target
  alignas(64) Want wants[kWants];
  Piece pieces[kPieces];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "flags are shared between processes");

struct Offsets {
  int64_t members, block, block_bytes;                // of the region
  int64_t counts, lists, records, results, gathered;  // of a block
  int64_t pairs, pair_bytes, piece_bytes, bytes;
};

inline Offsets offsets_of(const Shape& shape) {
  constexpr int64_t kPage = 4096;
  const int64_t ranks = shape.ranks, tokens = shape.max_tokens;
  Offsets at{};
  at.members = align_up(sizeof(Header), 64);
  at.block = align_up(at.members + ranks * static_cast<int64_t>(sizeof(Member)), kPage);
  at.counts = 0;
  at.lists = align_up(at.counts + 8 * ranks, 64);
  at.records = align_up(at.lists + 4 * ranks * tokens, 64);
  at.results = align_up(at.records + tokens * record_of(shape).bytes, 64);
  at.gathered = align_up(at.results + tokens * shape.top_k * result_bytes(shape), 64);
  at.block_bytes = align_up(at.gathered + 8 * kMostGathered, kPage);
  at.pairs = at.block + ranks * at.block_bytes;
  // 8 MiB for all rings together, whatever the number of ranks (until a piece would be under 1 KiB).
  const int64_t share = (int64_t{8} << 20) / (ranks * ranks * kPieces);
  at.piece_bytes =
      std::clamp<int64_t>(static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(share, 1)))),
                          1024, int64_t{256} << 10);
  at.pair_bytes = align_up(sizeof(Pair), 64) + kPieces * at.piece_bytes;
  at.bytes = align_up(at.pairs + ranks * ranks * at.pair_bytes, kPage);
  return at;
}

class Region {
 public:
  Region(uint8_t* base, const Shape& shape) : base_(base), shape_(shape), at_(offsets_of(shape)) {}

  const Shape& shape() const { return shape_; }
  const Offsets& at() const { return at_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Member& member(int rank) const { return reinterpret_cast<Member*>(base_ + at_.members)[rank]; }
  std::atomic<uint64_t>& count(int source, int target) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(block(source) + at_.counts)[target];
  }
  int32_t* list(int source, int target) const {
    return reinterpret_cast<int32_t*>(block(source) + at_.lists) + int64_t{target} * shape_.max_tokens;
  }
  uint8_t* record(int source, int64_t token) const {
    return block(source) + at_.records + token * record_of(shape_).bytes;
  }
  uint8_t* result(int home, int64_t row) const { return block(home) + at_.results + row * result_bytes(shape_); }
  int64_t* gathered(int rank) const { return reinterpret_cast<int64_t*>(block(rank) + at_.gathered); }
  Pair& pair(int source, int target) const {
    return *reinterpret_cast<Pair*>(base_ + at_.pairs + (int64_t{source} * shape_.ranks + target) * at_.pair_bytes);
  }
  uint8_t* piece(int source, int target, uint64_t number) const {
    return reinterpret_cast<uint8_t*>(&pair(source, target)) + align_up(sizeof(Pair), 64) +
           static_cast<int64_t>(number % kPieces) * at_.piece_bytes;
  }

 private:
  uint8_t* block(int rank) const { return base_ + at_.block + rank * at_.block_bytes; }

  uint8_t* base_;
  Shape shape_;
  Offsets at_;
};

}  // namespace ep_comm
