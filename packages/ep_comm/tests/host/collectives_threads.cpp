// The collectives' own device code, all ranks' CTAs at once, under emulated schedules. The clock counts pauses.
#include "device_threads.hpp"

#include <climits>

static Index blockDim;
inline unsigned __ballot_sync(unsigned, int value) {
  const uint64_t* lanes = emulation::gather(value != 0 ? 1u : 0u);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(lanes[i] & 1) << i;
  return mask;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

#include "cuda/collectives.hpp"

namespace ep_comm::cuda {

inline uint64_t clock_ticks = 0;

inline void fence_system() {}
inline uint64_t load_acquire(const uint64_t* from) { return *from; }
inline void store_flag(uint64_t* to, uint64_t value) {
  ++emulation::running->changes;
  *to = value;
}
inline void store_16(void* to, uint4 v) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulation::fail("a store's alignment");
  std::memcpy(to, &v, 16);
}
inline uint64_t now() { return clock_ticks; }
inline void pause() {
  ++clock_ticks, ++emulation::running->changes;
  emulation::leave();
}

}  // namespace ep_comm::cuda

#include "cuda/sm90/combine.cuh"
#include "cuda/sm90/dispatch.cuh"

using namespace ep_comm;
using namespace ep_comm::cuda;

constexpr int kHostWarps = 2;

template <Format F>
void run_dispatch(Op op, const RankArgs& a, int cta, int ctas) {
  auto& shared = *reinterpret_cast<DispatchShared*>(emulated_shared());
  if (op == Op::push) dispatch<F, true, kHostWarps>(a, cta, ctas, shared);
  if (op == Op::announce) dispatch<F, false, kHostWarps>(a, cta, ctas, shared);
  if (op == Op::collect) collect<F, kHostWarps>(a, cta, ctas, shared);
}

void run_one(Op op, const RankArgs& a, int cta, int ctas) {
  auto& combined = *reinterpret_cast<CombineShared*>(emulated_shared());
  if (op == Op::barrier) return barrier(a, cta, ctas, &combined.word);
  if (op == Op::combine)
    return a.shape.combine == Format::float32 ? combine<Format::float32, kHostWarps>(a, cta, ctas, combined)
                                              : combine<Format::bfloat16, kHostWarps>(a, cta, ctas, combined);
  if (a.shape.dispatch == Format::float32) return run_dispatch<Format::float32>(op, a, cta, ctas);
  if (a.shape.dispatch == Format::bfloat16) return run_dispatch<Format::bfloat16>(op, a, cta, ctas);
  run_dispatch<Format::fp8>(op, a, cta, ctas);
}

static Shape shape_of(const int32_t* s) {
  return {s[0], s[1], s[2], s[3], s[4], static_cast<Format>(s[5]), static_cast<Format>(s[6])};
}

extern "C" void region_offsets(const int32_t* shape, int fixed, int packed, int64_t* to) {
  const Region at = region_of(shape_of(shape), fixed, packed);
  const int64_t all[] = {at.sent_ids, at.x,       at.scales, at.ids,     at.weights,
                         at.sources,  at.records, at.lists,  at.results, at.bytes};
  std::copy(std::begin(all), std::end(all), to);
}

constexpr int kSnapshot = 5;  // no collective: the fixed rows as they are, to `out`

// One launch in which each rank goes through `steps` collectives as a stream would, however far ahead of the others.
// `ops`: [steps, ranks], -1 where the rank does not come. `values`: [steps, ranks, 16], see below.
extern "C" void run_program(const int32_t* shape, int fixed_region, int packed_region, uint8_t* const* regions,
                            Report* const* reports, uint64_t limit, int steps, const int32_t* ops,
                            const int64_t* values, int ctas, uint64_t seed, char* error) {
  const Shape s = shape_of(shape);
  const Region at = region_of(s, fixed_region, packed_region);
  std::vector<RankArgs> args;
  for (int i = 0; i < steps * s.ranks; ++i) {
    const int64_t* v = values + 16 * i;
    RankArgs a{};
    a.shape = s, a.region = at, a.rank = i % s.ranks, a.peers = regions, a.report = reports[a.rank], a.limit = limit;
    a.tokens = v[0], a.x = reinterpret_cast<void*>(v[1]), a.ids = reinterpret_cast<int32_t*>(v[2]);
    a.weights = reinterpret_cast<float*>(v[3]), a.counts = reinterpret_cast<int32_t*>(v[4]);
    a.host_counts = reinterpret_cast<int32_t*>(v[5]), a.rows_x = reinterpret_cast<uint8_t*>(v[6]);
    a.rows_scales = reinterpret_cast<float*>(v[7]), a.rows_ids = reinterpret_cast<int32_t*>(v[8]);
    a.rows_weights = reinterpret_cast<float*>(v[9]), a.rows_sources = reinterpret_cast<int32_t*>(v[10]);
    a.y = reinterpret_cast<void*>(v[11]), a.out = reinterpret_cast<float*>(v[12]);
    a.x_narrow = a.y_narrow = v[13], a.fixed = v[14], a.form = static_cast<Form>(v[15]);
    args.push_back(a);
  }
  blockDim.x = kHostWarps * 32;
  std::vector<int64_t> done(static_cast<size_t>(s.ranks));
  const auto kernel = [&] {
    const int rank = static_cast<int>(blockIdx.x) / ctas, cta = static_cast<int>(blockIdx.x) % ctas;
    for (int step = 0; step < steps; ++step) {
      const RankArgs& a = args[static_cast<size_t>(step * s.ranks + rank)];
      const int op = ops[step * s.ranks + rank];
      if (op == kSnapshot && cta == 0 && threadIdx.x == 0) std::memcpy(a.out, a.peers[rank] + at.x, at.records - at.x);
      if (op >= 0 && op < kSnapshot) run_one(static_cast<Op>(op), a, cta, ctas);
      ++emulation::running->changes;
      const int64_t all = int64_t{step + 1} * ctas * blockDim.x;
      int64_t* count = &done[static_cast<size_t>(rank)];
      ++*count;
      emulation::wait_until([=] { return *count >= all; }, [] { return std::string("the launch before"); });
    }
  };
  const std::string text =
      emulation::launch(static_cast<unsigned>(s.ranks * ctas), blockDim.x, sizeof(DispatchShared), seed, 60, kernel);
  std::snprintf(error, 400, "%s", text.c_str());
}

#include "publish_threads.hpp"
