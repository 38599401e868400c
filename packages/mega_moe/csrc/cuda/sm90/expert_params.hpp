// Arguments of the SM90 expert kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mega_moe::sm90 {

// Parts of the work: all at once, or launch by launch as a chain that gives the same bits.
enum Part : int { kGather = 1, kFirst = 2, kSecond = 4, kCombine = 8, kAll = 15 };

inline constexpr int kMostRanks = 8;

// Ranks that read and write each other's memory: a token's rank gives x and weights and takes the parts of its sums;
// each rank has `experts` experts of its own, rank r those from r * experts on. A table has an entry for each rank.
// Launches of all ranks run at the same time; each needs its CTAs on the device at once.
struct Ranks {
  int world, rank;  // 1, 0: no other rank
  int rows;         // numbers of rows are rank * rows + token * slots + slot
  bool met;         // a barrier of all ranks came before: inputs are there, and parts may be written
  const void* x[kMostRanks];
  const float* weights[kMostRanks];
  float* parts[kMostRanks];
  int32_t* flags[kMostRanks];  // [2 * world], zero before the first launch
};

struct ExpertsParams {
  const void* x;  // [tokens, d], bfloat16 or float32 (rounded to bfloat16)
  int x_is_float;
  int tokens, slots, d, inter, experts;
  const int32_t* ids;       // [tokens, slots]; outside of [0, experts): an empty slot
  const float* weights;     // [tokens, slots]
  const int32_t* offsets;   // [experts + 1], prefix sums of rows sorted by expert
  const int32_t* rows;      // [tokens * slots], position to token * slots + slot
  const uint8_t *w13, *w2;  // packed MXFP4
  // Where an expert's weights stand among them, [experts]; null: expert e is the e-th.
  const int32_t* places;
  // W4A8: weights packed for it, and the rows' factors in packed order, [experts, 2 inter] and [experts, d]; else null
  const float *scale13, *scale2;
  const uint8_t *shared13, *shared2;  // packed, or null
  int shared_format;                  // Format
  float limit;
  void* out;  // [tokens, d], bfloat16 or float32; not touched without kCombine
  int out_is_float;
  uint8_t* images;  // of x
  uint8_t* hidden;  // images of the first product's result
  float* parts;     // [tokens * slots + tokens, d]
  int32_t* state;   // counters, zero before the first launch; one of them counts launches, if there are ranks
  Ranks ranks;      // tables of one rank are filled in by the launch
  int parts_of_work;
};

struct ExpertsSizes {
  int64_t images, hidden, parts, state;  // bytes; state has to be zeroed once
};

// Workspace of any launch with at most these sizes.
ExpertsSizes experts_sizes(int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool shared,
                           int columns);

// `columns`: largest token tile, 8, 16, 32, 64 or 128; `variant`: see experts.cu. No bit depends on either, nor on
// `ctas`. cudaErrorInvalidValue, before anything is written, where the sizes do not fit.
cudaError_t experts(const ExpertsParams& p, int columns, int variant, int ctas, cudaStream_t stream);

}  // namespace mega_moe::sm90
