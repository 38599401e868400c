// What ranks agree on, on CPUs and GPUs: how a token's record lies in memory, what flags and counts say, where
// results go. Regions that hold these are the transports' own.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define EP_COMM_BOTH __host__ __device__ __forceinline__
#else
#define EP_COMM_BOTH [[gnu::always_inline]] inline  // compiled for several instruction sets: never shared
#endif

namespace ep_comm {

// Numbers cross the border to Python, and stand in shared files: they do not change.
enum class Format : int32_t { float32 = 0, bfloat16 = 1, fp8 = 2 };
enum class Kind : int32_t { none = 0, dispatch = 1, combine = 2, barrier = 3, all_gather = 4, join = 5 };
enum class Form : int32_t { slots = 0, ranks = 1 };

constexpr int32_t kGroup = 128;       // channels that share a scale
constexpr float kFp8Max = 448.0f;     // largest E4M3 value
constexpr int64_t kRecordAlign = 16;  // records start and end at what one vector access moves
constexpr int64_t kMostGathered = 65536;

struct Shape {
  int32_t ranks;
  int32_t max_tokens;
  int32_t hidden;
  int32_t top_k;
  int32_t experts;
  Format dispatch;
  Format combine;
};

EP_COMM_BOTH int64_t element_bytes(Format format) {
  return format == Format::float32 ? 4 : format == Format::bfloat16 ? 2 : 1;
}

EP_COMM_BOTH int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Byte offsets inside a record: channels, scales (fp8 only), physical expert ids int32[top_k] with -1 for an empty
// slot, weights float32[top_k], the token's number at its source int32. The rest up to `bytes` is padding.
struct Record {
  int64_t scales;
  int64_t ids;
  int64_t weights;
  int64_t token;
  int64_t bytes;
};

EP_COMM_BOTH Record record_of(const Shape& shape) {
  Record record{};
  record.scales = int64_t{shape.hidden} * element_bytes(shape.dispatch);  // a multiple of 4: hidden is
  const int64_t scales = shape.dispatch == Format::fp8 ? int64_t{4} * (shape.hidden / kGroup) : 0;
  record.ids = record.scales + scales;
  record.weights = record.ids + int64_t{4} * shape.top_k;
  record.token = record.weights + int64_t{4} * shape.top_k;
  record.bytes = align_up(record.token + 4, kRecordAlign);
  return record;
}

EP_COMM_BOTH int64_t result_bytes(const Shape& shape) { return int64_t{shape.hidden} * element_bytes(shape.combine); }

// Where expert `id` of the group is, and what number it has there. An empty slot (-1) is on no rank.
EP_COMM_BOTH int32_t rank_of(const Shape& shape, int32_t id) { return id < 0 ? -1 : id / shape.experts; }
EP_COMM_BOTH int32_t local_expert(const Shape& shape, int32_t id, int32_t rank) {
  return rank_of(shape, id) == rank ? id - rank * shape.experts : -1;
}

// The first slot of a token that `rank` holds, -1 without one. In form "ranks" a rank's sum comes home in this slot's
// row, so both forms share one buffer of [max_tokens, top_k] rows at the token's source.
EP_COMM_BOTH int32_t first_slot(const Shape& shape, const int32_t* ids, int32_t rank) {
  for (int32_t slot = 0; slot < shape.top_k; ++slot)
    if (rank_of(shape, ids[slot]) == rank) return slot;
  return -1;
}
EP_COMM_BOTH int64_t result_row(const Shape& shape, int32_t token, int32_t slot) {
  return int64_t{token} * shape.top_k + slot;
}

// Row of a received token in fixed form; in packed form it is the sum of earlier sources' counts + index.
EP_COMM_BOTH int64_t fixed_row(const Shape& shape, int32_t source, int32_t index) {
  return int64_t{source} * shape.max_tokens + index;
}

// A flag: epoch in 40 bits, kind in 8, and 16 bits that ranks have to agree on too (combine: the form; all_gather: the
// length less 1). Epochs begin at 1 and grow, so memory of zeros says "nobody yet" and nothing is ever cleared.
EP_COMM_BOTH uint64_t stamp(uint64_t epoch, Kind kind, uint32_t detail) {
  return epoch << 24 | static_cast<uint64_t>(kind) << 16 | (detail & 0xFFFFu);
}
EP_COMM_BOTH uint64_t stamp_epoch(uint64_t flag) { return flag >> 24; }
EP_COMM_BOTH Kind stamp_kind(uint64_t flag) { return static_cast<Kind>(flag >> 16 & 0xFFu); }
EP_COMM_BOTH uint32_t stamp_detail(uint64_t flag) { return static_cast<uint32_t>(flag & 0xFFFFu); }

// A count of rows with the low 32 bits of its epoch.
EP_COMM_BOTH uint64_t stamped_count(uint64_t epoch, uint32_t count) { return epoch << 32 | count; }
EP_COMM_BOTH bool count_is_of(uint64_t word, uint64_t epoch) { return (word >> 32) == (epoch & 0xFFFFFFFFu); }
EP_COMM_BOTH uint32_t count_in(uint64_t word) { return static_cast<uint32_t>(word); }

// The scale of 128 channels from the largest magnitude that is not NaN. A group of zeros, or of values so small that
// the quotient is zero, gets 1; an infinity gives an infinite scale, so the whole group comes back as NaN.
EP_COMM_BOTH float fp8_scale(float largest) {
  const float scale = largest / kFp8Max;
  return scale == 0.0f ? 1.0f : scale;
}

}  // namespace ep_comm
