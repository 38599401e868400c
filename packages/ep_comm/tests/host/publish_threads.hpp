// Publish by all ranks at once, a few turns after each other as a stream would run them.
#pragma once

#include "cuda/sm90/publish.cuh"

// `values`: [turns, ranks, 16]: tokens, x, x_narrow, ids, weights, rows, weights at home, slots, physical, padding,
// logical, own, counts, copies, routed, received; addresses as numbers, 0 for none.
extern "C" void run_publish(const int32_t* shape, uint8_t* const* regions, Report* const* reports, uint64_t limit,
                            int turns, const int64_t* values, const uint8_t* comes, int ctas, uint64_t seed,
                            char* error) {
  const Shape s = shape_of(shape);
  const Region at = region_of(s, false, true);
  std::vector<std::vector<int32_t*>> slots(static_cast<size_t>(turns));
  std::vector<PublishArgs> args;
  for (int turn = 0; turn < turns; ++turn)
    for (int r = 0; r < s.ranks; ++r)
      slots[static_cast<size_t>(turn)].push_back(reinterpret_cast<int32_t*>(values[16 * (turn * s.ranks + r) + 7]));
  for (int i = 0; i < turns * s.ranks; ++i) {
    const int64_t* v = values + 16 * i;
    const auto ints = [&](int k) { return reinterpret_cast<int32_t*>(v[k]); };
    PublishArgs a{};
    a.rank.shape = s, a.rank.region = at, a.rank.rank = i % s.ranks, a.rank.peers = regions;
    a.rank.report = reports[a.rank.rank], a.rank.limit = limit;
    a.rank.tokens = v[0], a.rank.x = reinterpret_cast<void*>(v[1]), a.rank.x_narrow = v[2] != 0;
    a.rank.ids = ints(3), a.rank.weights = reinterpret_cast<float*>(v[4]);
    a.rows = reinterpret_cast<uint16_t*>(v[5]), a.weights = reinterpret_cast<float*>(v[6]);
    a.slots = slots[static_cast<size_t>(i / s.ranks)].data(), a.physical = ints(8);
    a.padding = reinterpret_cast<uint8_t*>(v[9]);
    a.copies = {static_cast<int32_t>(v[10]), ints(11), ints(12), ints(13)};
    a.routed = ints(14), a.received = reinterpret_cast<int64_t*>(v[15]);
    args.push_back(a);
  }
  blockDim.x = kHostWarps * 32;
  std::vector<int64_t> done(static_cast<size_t>(s.ranks));
  const auto kernel = [&] {
    const int rank = static_cast<int>(blockIdx.x) / ctas, cta = static_cast<int>(blockIdx.x) % ctas;
    int* word = &reinterpret_cast<CombineShared*>(emulated_shared())->word;
    for (int turn = 0; turn < turns; ++turn) {
      if (comes[turn * s.ranks + rank]) publish(args[static_cast<size_t>(turn * s.ranks + rank)], cta, ctas, word);
      ++emulation::running->changes;
      const int64_t all = int64_t{turn + 1} * ctas * blockDim.x;
      int64_t* count = &done[static_cast<size_t>(rank)];
      ++*count;
      emulation::wait_until([=] { return *count >= all; }, [] { return std::string("the launch before"); });
    }
  };
  const std::string text =
      emulation::launch(static_cast<unsigned>(s.ranks * ctas), blockDim.x, sizeof(DispatchShared), seed, 60, kernel);
  std::snprintf(error, 400, "%s", text.c_str());
}
