// Launches of the ops on rows of logits.
#include "cuda/rows.hpp"

#include <algorithm>
#include <climits>

#include "cuda/sm90/row_flow.cuh"

namespace dspark_kernels::cuda {
namespace {

constexpr int kStatsWarps = 8, kTeam = 128, kWantedTeams = 6 * 132, kMostParts = 32;
constexpr int kMostPlaces = 9;
// Of the flow: blocks of 1024 logits that a warp measures at a time, and rows from which on it was faster on an H200.
constexpr int kFlowBlocks = 4, kFlowRows = 256;

// A later launch may start while an earlier one ends, and waits where it needs its results.
__device__ __forceinline__ void start_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_last_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Blocks of threads on a multiprocessor; with three, SM100's compiler spills a register.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBiasBlocks = 2;
#else
constexpr int kBiasBlocks = 3;
#endif

template <bool Bias>
__global__ void __launch_bounds__(32 * kStatsWarps, Bias ? kBiasBlocks : 4) measure_kernel(Rows a, int parts) {
  start_next_launch();
  const int64_t request = blockIdx.x / parts;
  const int block = static_cast<int>(blockIdx.x % parts) * kStatsWarps + static_cast<int>(threadIdx.x / 32);
  if (block < row_blocks(a.vocab))
    measure_block<Bias>(a, request, static_cast<int>(blockIdx.y), block, static_cast<int>(threadIdx.x % 32));
}

// How an op ends a row
struct EndSample {
  static constexpr int kTeamsAtOnce = 6;  // on a multiprocessor
  static constexpr bool kFlows = false;   // rows without filters are ended by their first launch
  Sample a;
  __device__ __forceinline__ void prefetch(int64_t, int, int64_t) const {}
  __device__ __forceinline__ void operator()(int64_t, int64_t t, int, const Row& row, const BlockStats* stats,
                                             const Known& known, const Team& team, LawShared& shared) const {
    sample_row(a, t, row, stats, known, team, shared);
  }
};
struct EndDraft {
  static constexpr int kTeamsAtOnce = 5;
  static constexpr bool kFlows = false;
  DraftStep a;
  __device__ __forceinline__ void prefetch(int64_t, int, int64_t) const {}
  __device__ __forceinline__ void operator()(int64_t, int64_t b, int, const Row& row, const BlockStats* stats,
                                             const Known& known, const Team& team, LawShared& shared) const {
    draft_row(a, b, row, stats, known, team, shared);
  }
};
struct EndVerify {
  static constexpr int kTeamsAtOnce = 6;
  static constexpr bool kFlows = false;
  Verify a;
  Decision* decisions;
  __device__ __forceinline__ void prefetch(int64_t r, int place, int64_t index) const {
    prefetch_decision(a, r, place, index);
  }
  __device__ __forceinline__ void operator()(int64_t index, int64_t r, int place, const Row& row,
                                             const BlockStats* stats, const Known& known, const Team& team,
                                             LawShared& shared) const {
    decide_row(a, decisions, r, place, index, row, stats, known, team, shared);
  }
};
struct EndFlow {
  static constexpr int kTeamsAtOnce = 5;
  static constexpr bool kFlows = true;
  Verify a;
  Decision* decisions;
  Flow flow;
  __device__ __forceinline__ void prefetch(int64_t, int, int64_t) const {}
  __device__ __forceinline__ void operator()(int64_t index, int64_t r, int place, const Row& row,
                                             const BlockStats* stats, const Known& known, const Team& team,
                                             LawShared& shared) const {
    const Verdict verdict = decide_row(a, decisions, r, place, index, row, stats, known, team, shared);
    if (settle_row(flow, r, place, verdict, team, shared)) finish_request(a, decisions, flow, r, team);
  }
};

// Some block of every launch waits for the launch before, so that launches end in order.
template <typename End>
__global__ void __launch_bounds__(kTeam, End::kTeamsAtOnce) first_kernel(Rows a, int parts, End end) {
  __shared__ FilterShared shared;
  start_next_launch();
  const int64_t request = blockIdx.x / parts;
  const int place = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x % parts);
  const Params params = params_of(a, request);
  const bool filtered = params.filtered(a.vocab);
  if (!filtered && (End::kFlows ? blockIdx.x != 0 || blockIdx.y != 0 : part != 0)) return;
  const int64_t index = a.index(request, place);
  if (index >= 0 && part == 0 && threadIdx.x == 0) end.prefetch(request, place, index);
  wait_for_last_launch();
  if (index < 0 || (End::kFlows && !filtered)) return;
  const Team team(kTeam);
  if constexpr (End::kFlows)
    if (place_is_behind_end(end.flow, request, place, team, shared.law)) return;
  read_first(a, index, params, part, parts, team, shared,
             [&](const Row& row, const BlockStats* stats, const Known& known) {
               end(index, request, place, row, stats, known, team, shared.law);
             });
}

template <typename End>
__global__ void __launch_bounds__(kTeam, 5) again_kernel(Rows a, int parts, End end) {
  __shared__ LawShared shared;
  start_next_launch();
  const int64_t request = blockIdx.x / parts;
  const int place = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x % parts);
  const Params params = params_of(a, request);
  const bool filtered = params.filtered(a.vocab);
  if (!filtered && (blockIdx.x != 0 || blockIdx.y != 0)) return;
  wait_for_last_launch();
  const int64_t index = a.index(request, place);
  if (index < 0 || !filtered) return;
  const Team team(kTeam);
  if constexpr (End::kFlows)
    if (place_is_behind_end(end.flow, request, place, team, shared)) return;
  read_again(a, index, params, part, parts, team, shared,
             [&](const Row& row, const BlockStats* stats, const Known& known) {
               end(index, request, place, row, stats, known, team, shared);
             });
}

__global__ void __launch_bounds__(kTeam, 5) end_kernel(Verify a, Rows rows, const Decision* decisions, int parts) {
  __shared__ LawShared shared;
  const Team team(kTeam);
  const int64_t request = blockIdx.x / parts;
  const EndInputs inputs(a, request, team.lane);
  wait_for_last_launch();
  end_request(a, rows, decisions, request, inputs, static_cast<int>(blockIdx.x % parts), parts, team, shared);
}

__global__ void __launch_bounds__(256) clear_kernel(uint4* at, int64_t count) {
  start_next_launch();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) at[i] = {0, 0, 0, 0};
}

__global__ void __launch_bounds__(kTeam, 5) flow_kernel(EndFlow end, Rows rows, unsigned parts, int each) {
  __shared__ LawShared shared;
  start_next_launch();
  flow_part(end.a, rows, end.decisions, end.flow, blockIdx.x / parts, static_cast<int>(blockIdx.y),
            static_cast<int>(blockIdx.x % parts), static_cast<int>(parts), each, Team(kTeam), shared,
            [] { wait_for_last_launch(); });
}

__global__ void __launch_bounds__(kTeam, 5) drain_kernel(EndFlow end, Rows rows) {
  __shared__ LawShared shared;
  wait_for_last_launch();
  drain_redraws(end.a, rows, end.decisions, end.flow, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
                Team(kTeam), shared);
}

__global__ void __launch_bounds__(256) mask_kernel(TokenMask a) {
  const int64_t mask = blockIdx.x;
  const int64_t to = a.rows ? a.rows[mask] : mask;
  if (to < 0) return;
  float* row = a.logits + to * a.vocab;
  for (int64_t w = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; w < a.words;
       w += static_cast<int64_t>(gridDim.y) * blockDim.x) {
    for (uint32_t banned = ~static_cast<uint32_t>(a.bitmask[mask * a.words + w]); banned; banned &= banned - 1) {
      const int64_t token = 32 * w + __ffs(static_cast<int>(banned)) - 1;
      if (token < a.vocab) row[token] = -infinity();
    }
  }
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_early(Kernel kernel, dim3 grid, int threads, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments...);
  return status != cudaSuccess ? status : cudaGetLastError();
}

int64_t align_16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Scratch memory of a row's statistics, work, flow, histogram and band, one after another for all rows.
struct Places {
  int64_t stats, work, bits, redraws, taken, ends, decisions, mass, count, band, end;
  Places(int64_t rows, int64_t vocab) {
    stats = 0;
    work = stats + rows * row_blocks(vocab) * static_cast<int64_t>(sizeof(BlockStats));
    bits = align_16(work + rows * static_cast<int64_t>(sizeof(RowWork)));
    redraws = bits + rows * 4;
    taken = redraws + (rows + 1) * 4;
    ends = taken + (rows + 1) * 4;
    decisions = align_16(ends + 2 * 4);
    mass = align_16(decisions + rows * static_cast<int64_t>(sizeof(Decision)));
    count = mass + rows * kFilterBins * 8;
    band = count + rows * kFilterBins * 4;
    end = band + rows * kBand * 8;
  }
};

Rows place_rows(Rows rows, const Places& at, void* workspace) {
  char* base = static_cast<char*>(workspace);
  rows.stats = reinterpret_cast<BlockStats*>(base + at.stats);
  rows.work = reinterpret_cast<RowWork*>(base + at.work);
  rows.bin_mass = reinterpret_cast<unsigned long long*>(base + at.mass);
  rows.bin_count = reinterpret_cast<int32_t*>(base + at.count);
  rows.band = reinterpret_cast<uint64_t*>(base + at.band);
  return rows;
}

// Blocks of threads that share a row, so that the device is filled: a result does not depend on it.
int64_t parts_of(int64_t rows, int64_t vocab) {
  const int64_t blocks = row_blocks(vocab), least = (blocks + kMostBlocksAPart - 1) / kMostBlocksAPart;
  const int64_t most = std::min<int64_t>(kMostParts, (blocks + kTeam / 32 - 1) / (kTeam / 32));
  return std::max(least, std::min(most, kWantedTeams / std::max<int64_t>(rows, 1)));
}

template <typename End>
cudaError_t both_readings(const Rows& a, int64_t rows, int64_t requests, int64_t places, const End& end,
                          cudaStream_t stream) {
  const int64_t parts = parts_of(rows, a.vocab);
  if (requests * parts > INT_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(requests * parts), static_cast<unsigned>(places));
  const cudaError_t first = launch_early(first_kernel<End>, grid, kTeam, stream, a, static_cast<int>(parts), end);
  if (first != cudaSuccess) return first;
  return launch_early(again_kernel<End>, grid, kTeam, stream, a, static_cast<int>(parts), end);
}

// Statistics of all blocks, then both readings
template <typename End>
cudaError_t each_row(const Rows& a, int64_t rows, int64_t requests, int64_t places, const End& end,
                     cudaStream_t stream) {
  const int64_t wide = (row_blocks(a.vocab) + kStatsWarps - 1) / kStatsWarps;
  if (requests * wide > INT_MAX) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(requests * wide), static_cast<unsigned>(places));
  const int threads = 32 * kStatsWarps;
  if (a.bias) {
    measure_kernel<true><<<grid, threads, 0, stream>>>(a, static_cast<int>(wide));
  } else {
    measure_kernel<false><<<grid, threads, 0, stream>>>(a, static_cast<int>(wide));
  }
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  return both_readings(a, rows, requests, places, end, stream);
}

// Verification in one flow, each warp measuring `each` blocks of a row at a time; both readings are for filters.
cudaError_t flow(const EndFlow& end, const Rows& rows, void* cleared, int64_t cleared_bytes, int each,
                 cudaStream_t stream) {
  const int64_t requests = end.a.requests, places = end.a.drafts + 1, warps = kTeam / 32 * each;
  const int64_t parts = (row_blocks(rows.vocab) + warps - 1) / warps, words = cleared_bytes / 16;
  if (requests * std::max<int64_t>(parts, end.flow.parts) > INT_MAX) return cudaErrorInvalidValue;
  clear_kernel<<<static_cast<unsigned>((words + 255) / 256), 256, 0, stream>>>(static_cast<uint4*>(cleared), words);
  cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>(requests * parts), static_cast<unsigned>(places));
  status = launch_early(flow_kernel, grid, kTeam, stream, end, rows, static_cast<unsigned>(parts), each);
  if (status != cudaSuccess) return status;
  if (rows.top_p || rows.top_k) status = both_readings(rows, end.a.rows, requests, places, end, stream);
  if (status != cudaSuccess) return status;
  constexpr int64_t kRedrawsAtOnce = 64;
  const auto teams = static_cast<unsigned>(std::min(requests, kRedrawsAtOnce) * end.flow.parts);
  return launch_early(drain_kernel, dim3(teams), kTeam, stream, end, rows);
}

bool sizes_fit(int64_t rows, int64_t vocab) { return rows >= 0 && rows <= INT_MAX && rows_fit(vocab); }

}  // namespace

bool rows_fit(int64_t vocab) { return vocab >= 1 && row_blocks(vocab) <= kMostBlocks; }

int64_t rows_workspace(int64_t rows, int64_t vocab) { return Places(rows, vocab).end; }

cudaError_t sample(const Sample& a, void* workspace, cudaStream_t stream) {
  if (!sizes_fit(a.tokens, a.vocab) || (a.tokens && !workspace)) return cudaErrorInvalidValue;
  if (a.tokens == 0) return cudaSuccess;
  // The logits are only written to with a bias.
  const Rows rows = place_rows({.logits = const_cast<float*>(a.logits),
                                .row_stride = a.vocab,
                                .vocab = a.vocab,
                                .temperature = a.temperature,
                                .top_p = a.top_p,
                                .top_k = a.top_k},
                               Places(a.tokens, a.vocab), workspace);
  return each_row(rows, a.tokens, a.tokens, 1, EndSample{a}, stream);
}

cudaError_t draft_step(const DraftStep& a, void* workspace, cudaStream_t stream) {
  if (!sizes_fit(a.requests, a.vocab) || (a.requests && !workspace)) return cudaErrorInvalidValue;
  if (a.requests == 0) return cudaSuccess;
  const Rows rows = place_rows({.logits = a.logits,
                                .row_stride = a.row_stride,
                                .bias = a.bias,
                                .vocab = a.vocab,
                                .temperature = a.temperature,
                                .top_p = a.top_p,
                                .top_k = a.top_k},
                               Places(a.requests, a.vocab), workspace);
  return each_row(rows, a.requests, a.requests, 1, EndDraft{a}, stream);
}

cudaError_t verify(const Verify& a, void* workspace, cudaStream_t stream) {
  if (!sizes_fit(a.rows, a.vocab) || !sizes_fit(a.requests, a.vocab) || a.drafts < 0 || a.drafts >= kMostPlaces) {
    return cudaErrorInvalidValue;
  }
  if (a.requests == 0) return cudaSuccess;
  if (!workspace || !a.cu_rows) return cudaErrorInvalidValue;
  const Places at(std::max(a.rows, a.requests), a.vocab);
  const Rows rows = place_rows({.logits = const_cast<float*>(a.logits),
                                .row_stride = a.vocab,
                                .vocab = a.vocab,
                                .temperature = a.temperature,
                                .top_p = a.top_p,
                                .top_k = a.top_k,
                                .cu_rows = a.cu_rows},
                               at, workspace);
  char* base = static_cast<char*>(workspace);
  auto* decisions = reinterpret_cast<Decision*>(base + at.decisions);
  if (!a.top_p && !a.top_k && a.rows >= kFlowRows) {
    const Flow list{reinterpret_cast<uint32_t*>(base + at.bits),
                    reinterpret_cast<int32_t*>(base + at.redraws),
                    reinterpret_cast<int32_t*>(base + at.taken),
                    reinterpret_cast<int32_t*>(base + at.ends),
                    static_cast<int>(a.requests),
                    static_cast<int>((row_blocks(a.vocab) + 7) / 8)};
    return flow({a, decisions, list}, rows, base + at.work, at.decisions - at.work, kFlowBlocks, stream);
  }
  const cudaError_t status = each_row(rows, a.rows, a.requests, a.drafts + 1, EndVerify{a, decisions}, stream);
  if (status != cudaSuccess) return status;
  const int64_t redraw = std::min((row_blocks(a.vocab) + 7) / 8, std::max<int64_t>(2, kWantedTeams * 4 / a.requests));
  return launch_early(end_kernel, dim3(static_cast<unsigned>(a.requests * redraw)), kTeam, stream, a, rows,
                      static_cast<const Decision*>(decisions), static_cast<int>(redraw));
}

cudaError_t token_mask(const TokenMask& a, cudaStream_t stream) {
  if (a.count < 0 || a.count > INT_MAX || a.vocab < 1 || a.words != (a.vocab + 31) / 32) return cudaErrorInvalidValue;
  if (a.count == 0) return cudaSuccess;
  const int64_t parts = (a.words + 511) / 512;
  mask_kernel<<<dim3(static_cast<unsigned>(a.count), static_cast<unsigned>(parts < 16 ? parts : 16)), 256, 0, stream>>>(
      a);
  return cudaGetLastError();
}

}  // namespace dspark_kernels::cuda
