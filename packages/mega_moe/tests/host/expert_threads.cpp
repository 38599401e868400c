// The expert kernels' own code under emulated schedules.
#include "device_threads.hpp"

#include <deque>

#include "cuda/sm90/expert_ptx.cuh"

namespace kernel_core::ptx {

// A thread's copies land as late as they may: when it waits for their group.
struct SmallCopy {
  uint32_t to;
  const void* from;
};
inline std::map<emulation::Thread*, std::deque<std::vector<SmallCopy>>> groups;

inline void cp_async_16(uint32_t to, const void* from, bool valid = true) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || !valid) emulation::fail("a copy's alignment");
  emulation::at(to, 16, 16);
  auto& mine = groups[emulation::me];
  if (mine.empty()) mine.emplace_back();
  mine.back().push_back({to, from});
}
inline void cp_async_commit() {
  auto& mine = groups[emulation::me];
  if (mine.empty()) mine.emplace_back();
  mine.emplace_back();  // the next group
}
template <int Pending>
void cp_async_wait() {
  auto& mine = groups[emulation::me];
  while (mine.size() > Pending + 1) {
    for (const SmallCopy& copy : mine.front()) std::memcpy(emulation::at(copy.to, 16, 16), copy.from, 16);
    mine.pop_front();
  }
}
inline void fence_proxy_async() {}

}  // namespace kernel_core::ptx

namespace mega_moe::sm90 {

inline void prefetch_line(const void*) {}

inline void fence_proxy_async_all() {}
inline uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }
inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
inline void count_release(int32_t* to) { atomicAdd(to, 1); }
inline int load_acquire(const int32_t* from) { return *from; }
inline uint32_t load_shared_4(uint32_t from) { return emulation::load<uint32_t>(from); }
inline uint2 load_shared_8(uint32_t from) { return emulation::load<uint2>(from); }
inline void product_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  kernel_core::wgmma::Product<64>::rs_e4m3(d, a, b, accumulate);
}
inline void store_release_system(int32_t* to, int v) {
  ++emulation::running->changes;
  *to = v;
}
inline bool wait_for_flag(const int32_t* flags, int at, int32_t*, int target) {
  emulation::wait_until([=] { return flags[at] >= target; },
                        [=] { return "flag " + std::to_string(at) + " of " + std::to_string(target); });
  return true;
}
inline bool wait_for_count(int32_t* state, int word, int target) {
  emulation::wait_until([=] { return state[word] >= target; },
                        [=] {
                          return "counter " + std::to_string(word) + ": " + std::to_string(state[word]) + " of " +
                                 std::to_string(target);
                        });
  return true;
}

}  // namespace mega_moe::sm90

#include "cuda/sm90/expert_kernel.cuh"

namespace {

using namespace mega_moe::sm90;

// One kernel for each rank, at once.
template <int kColumns, int kBlocks, int kSteps, int kStages, bool kFp8 = false, int kSplit = 1, int kPerSm = 1>
std::string launch(const std::vector<ExpertsParams>& ranks, unsigned ctas, uint64_t seed, double seconds) {
  using C = ExpertConfig<kColumns, kBlocks, kSteps, kStages, kFp8, kSplit, kPerSm>;
  return emulation::launch(
      ctas, C::kThreads, sizeof(ExpertShared<C>), seed, seconds,
      [&] { experts_kernel<C>(ranks[emulation::me->cta->grid]); }, static_cast<unsigned>(ranks.size()));
}

constexpr int kPointers = 18;

ExpertsParams params(void* const* pointers, const int64_t* numbers, float limit) {
  const auto number = [&](int i) { return static_cast<int>(numbers[i]); };
  const auto at = [&](int i) { return static_cast<uint8_t*>(pointers[i]); };
  const auto ints = [&](int i) { return static_cast<int32_t*>(pointers[i]); };
  const auto floats = [&](int i) { return static_cast<float*>(pointers[i]); };
  ExpertsParams p{};
  p.x = pointers[0], p.ids = ints(1), p.weights = floats(2), p.offsets = ints(3);
  p.rows = ints(4), p.w13 = at(5), p.w2 = at(6), p.shared13 = at(7), p.shared2 = at(8), p.out = pointers[9];
  p.images = at(10), p.hidden = at(11), p.parts = floats(12), p.state = ints(13);
  p.scale13 = floats(14), p.scale2 = floats(15), p.places = ints(17);
  p.x_is_float = number(0), p.tokens = number(1), p.slots = number(2), p.d = number(3), p.inter = number(4);
  p.experts = number(5), p.shared_format = number(6), p.out_is_float = number(7), p.parts_of_work = number(8);
  p.limit = limit;
  return p;
}

}  // namespace

// For each of `world` ranks, `pointers`: x, ids, weights, offsets, rows, w13, w2, shared13, shared2, out, images,
// hidden, parts, state, scale13, scale2, flags, places; `numbers`: x_is_float, tokens, slots, d, inter, experts,
// shared_format, out_is_float, parts_of_work, columns, ctas, split. Returns an empty text or what went wrong.
extern "C" const char* run_experts(void* const* pointers, const int64_t* numbers, float limit, uint64_t seed,
                                   double seconds, int world, int rows_of_rank, int met) {
  std::vector<ExpertsParams> ranks;
  for (int r = 0; r < world; ++r) ranks.push_back(params(pointers + kPointers * r, numbers + 12 * r, limit));
  for (int r = 0; r < world; ++r) {
    Ranks& table = ranks[r].ranks;
    table.world = world, table.rank = r, table.rows = rows_of_rank, table.met = met != 0;
    for (int i = 0; i < world; ++i) {
      table.x[i] = ranks[i].x, table.weights[i] = ranks[i].weights, table.parts[i] = ranks[i].parts;
      table.flags[i] = static_cast<int32_t*>(pointers[kPointers * i + 16]);
    }
  }
  const auto ctas = static_cast<unsigned>(numbers[10]);
  const auto columns = numbers[9];
  const bool split = numbers[11] != 0;
  static std::string error;
  kernel_core::ptx::groups.clear();
  if (ranks[0].scale13 != nullptr)
    error = launch<128, 2, 1, 2, true>(ranks, ctas, seed, seconds);
  else if (split)
    error = columns == 8 ? launch<8, 2, 2, 3, false, 2>(ranks, ctas, seed, seconds)
                         : launch<16, 2, 1, 4, false, 2>(ranks, ctas, seed, seconds);
  else
    error = columns == 8    ? launch<8, 1, 2, 3>(ranks, ctas, seed, seconds)
            : columns == 16 ? launch<16, 1, 2, 4>(ranks, ctas, seed, seconds)
            : columns == 32 ? launch<32, 2, 2, 2>(ranks, ctas, seed, seconds)
            : columns == 64 ? launch<64, 2, 1, 3>(ranks, ctas, seed, seconds)
                            : launch<128, 2, 1, 2>(ranks, ctas, seed, seconds);
  return error.c_str();
}

extern "C" void sizes(const int64_t* numbers, int64_t* bytes) {
  const int64_t rows =
      most_image_rows(numbers[0], numbers[1], numbers[4], numbers[5] != 0, static_cast<int>(numbers[6]));
  bytes[0] = rows * numbers[2] * 2, bytes[1] = rows * numbers[3] * 2;
  bytes[2] = numbers[0] * (numbers[1] + 1) * numbers[2] * 4;
  bytes[3] = (kTileDone + most_tiles(numbers[0], numbers[1], numbers[4], numbers[5] != 0, 8)) * 4;
}
