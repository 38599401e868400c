// Sampling, draft steps and verification: the device's own code on host threads.
#include "threads.hpp"

inline void __threadfence() {}
inline uint32_t atomicAdd(uint32_t* to, uint32_t value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicOr(T* to, T bits) {
  return __atomic_fetch_or(to, bits, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicExch(T* to, T value) {
  return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST);
}
template <typename T>
void atomicMax(T* to, T value) {
  const std::lock_guard lock(block->mutex);
  *to = std::max(*to, value);
}

#include "cuda/sm90/confidence.cuh"
#include "cuda/sm90/row_flow.cuh"

using namespace dspark_kernels;
using namespace dspark_kernels::cuda;

namespace {

template <typename T>
T* at(void* const* pointers, int i) {
  return static_cast<T*>(pointers[i]);
}

template <typename Shared, typename F>
void by_team(int threads, int64_t items, F f) {
  const auto shared = std::make_unique<Shared>();
  std::memset(static_cast<void*>(shared.get()), 0x5A, sizeof(Shared));
  run_block(threads, reinterpret_cast<uint8_t*>(shared.get()), 0, [&] {
    const Team team(threads);
    for (int64_t i = 0; i < items; ++i) {
      f(i, team, *shared);
      __syncthreads();
    }
  });
}

// The launches of an op, one after another, each row shared by `parts` teams.
struct Launches {
  Rows rows;
  int64_t requests;
  int places, threads, parts;
  std::vector<BlockStats> stats;
  std::vector<RowWork> work;
  std::vector<unsigned long long> mass;
  std::vector<int32_t> count;
  std::vector<uint64_t> band;

  Launches(const Rows& given, int64_t count_rows, int64_t count_requests, int count_places, int team, int shares)
      : rows(given),
        requests(count_requests),
        places(count_places),
        threads(team),
        parts(shares),
        stats(static_cast<size_t>(count_rows * row_blocks(given.vocab))),
        work(static_cast<size_t>(count_rows), RowWork{7, 7, 7, 7, 7, 7, 7, 7, 7}),
        mass(static_cast<size_t>(count_rows * kFilterBins), 7),
        count(static_cast<size_t>(count_rows * kFilterBins), 7),
        band(static_cast<size_t>(count_rows * kBand), 7) {
    rows.stats = stats.data(), rows.work = work.data();
    rows.bin_mass = mass.data(), rows.bin_count = count.data(), rows.band = band.data();
  }

  template <bool Bias>
  void measure() {
    run_block(32, nullptr, 0, [&] {
      for (int64_t r = 0; r < requests; ++r)
        for (int place = 0; place < places; ++place)
          for (int b = 0; b < row_blocks(rows.vocab); ++b)
            measure_block<Bias>(rows, r, place, b, static_cast<int>(threadIdx.x));
    });
  }

  template <typename Shared, typename F>
  void each(F f) {
    by_team<Shared>(threads, requests * places * parts, [&](int64_t i, const Team& team, Shared& shared) {
      const int64_t r = i / parts / places;
      const int place = static_cast<int>(i / parts % places);
      const int64_t index = rows.index(r, place);
      if (index >= 0) f(r, place, index, static_cast<int>(i % parts), team, shared);
    });
  }

  // end(r, place, index, row, statistics, known, team, shared)
  template <typename End>
  void end(End f) {
    read([](int64_t, int, const Params&, const Team&, LawShared&) { return true; }, f);
  }

  // The readings of filtered rows alone, but of those that skip(r, place, team, shared) names
  template <typename Skip, typename End>
  void filtered(Skip skip, End f) {
    read([&](int64_t r, int place, const Params& params, const Team& team,
             LawShared& shared) { return params.filtered(rows.vocab) && !skip(r, place, team, shared); },
         f);
  }

  template <typename Asked, typename End>
  void read(Asked asked, End f) {
    const auto ends = [&](int64_t r, int place, int64_t index, const Team& team, LawShared& shared) {
      return [&, r, place, index](const Row& row, const BlockStats* own, const Known& known) {
        f(r, place, index, row, own, known, team, shared);
      };
    };
    each<FilterShared>([&](int64_t r, int place, int64_t index, int part, const Team& team, FilterShared& shared) {
      const Params params = params_of(rows, r);
      if (asked(r, place, params, team, shared.law))
        read_first(rows, index, params, part, parts, team, shared, ends(r, place, index, team, shared.law));
    });
    each<LawShared>([&](int64_t r, int place, int64_t index, int part, const Team& team, LawShared& shared) {
      const Params params = params_of(rows, r);
      if (params.filtered(rows.vocab) && asked(r, place, params, team, shared))
        read_again(rows, index, params, part, parts, team, shared, ends(r, place, index, team, shared));
    });
  }
};

// Launches of the version in one flow. Redraws are shared by `op.parts` teams; those that no team has taken when its
// own part was done are left to the drain.
void verify_in_one_flow(const Verify& a, Launches& op, std::vector<Decision>& decisions, int each) {
  const auto requests = static_cast<size_t>(a.requests);
  std::vector<uint32_t> bits(requests);
  std::vector<int32_t> redraws(requests + 1), taken(requests + 1), ends(2);
  std::fill(op.work.begin(), op.work.end(), RowWork{});
  const Flow flow{bits.data(), redraws.data(), taken.data(), ends.data(), static_cast<int>(a.requests), op.parts};
  const int warps = op.threads / 32 * each;
  const int parts = static_cast<int>((row_blocks(a.vocab) + warps - 1) / warps);
  by_team<LawShared>(op.threads, op.requests * op.places * parts, [&](int64_t i, const Team& team, LawShared& shared) {
    const int64_t place = i / parts / a.requests, r = i / parts % a.requests;
    flow_part(a, op.rows, decisions.data(), flow, r, static_cast<int>(place), static_cast<int>(i % parts), parts, each,
              team, shared, [] {});
  });
  op.filtered([&](int64_t r, int place, const Team& team,
                  LawShared& shared) { return place_is_behind_end(flow, r, place, team, shared); },
              [&](int64_t r, int place, int64_t index, const Row& row, const BlockStats* stats, const Known& known,
                  const Team& team, LawShared& shared) {
                const Verdict verdict =
                    decide_row(a, decisions.data(), r, place, index, row, stats, known, team, shared);
                if (settle_row(flow, r, place, verdict, team, shared))
                  finish_request(a, decisions.data(), flow, r, team);
              });
  const int teams = 2 * op.parts;
  by_team<LawShared>(op.threads, teams, [&](int64_t i, const Team& team, LawShared& shared) {
    drain_redraws(a, op.rows, decisions.data(), flow, static_cast<int>(i), teams, team, shared);
  });
}

}  // namespace

extern "C" void sample_host(int64_t tokens, int64_t vocab, int64_t number, void* const* p, int threads, int parts) {
  const Sample a = {tokens,
                    vocab,
                    at<float>(p, 0),
                    at<float>(p, 1),
                    at<float>(p, 2),
                    at<int32_t>(p, 3),
                    at<int64_t>(p, 4),
                    at<int64_t>(p, 5),
                    number,
                    at<int64_t>(p, 6),
                    at<float>(p, 7)};
  Launches op({.logits = at<float>(p, 0),
               .row_stride = vocab,
               .vocab = vocab,
               .temperature = a.temperature,
               .top_p = a.top_p,
               .top_k = a.top_k},
              tokens, tokens, 1, threads, parts);
  op.measure<false>();
  op.end([&](int64_t t, int, int64_t, const Row& row, const BlockStats* stats, const Known& known, const Team& team,
             LawShared& shared) { sample_row(a, t, row, stats, known, team, shared); });
}

extern "C" void draft_host(int64_t requests, int64_t vocab, int64_t drafts, int64_t step, int64_t row_stride,
                           void* const* p, int threads, int parts) {
  const DraftStep a = {requests,
                       vocab,
                       drafts,
                       step,
                       at<float>(p, 0),
                       row_stride,
                       at<float>(p, 1),
                       at<float>(p, 2),
                       at<float>(p, 3),
                       at<int32_t>(p, 4),
                       at<int64_t>(p, 5),
                       at<int64_t>(p, 6),
                       at<uint8_t>(p, 7),
                       at<int64_t>(p, 8),
                       at<int64_t>(p, 9),
                       at<float>(p, 10),
                       at<float>(p, 11),
                       at<float>(p, 12),
                       at<double>(p, 13),
                       at<int64_t>(p, 14)};
  Launches op({.logits = a.logits,
               .row_stride = row_stride,
               .bias = a.bias,
               .vocab = vocab,
               .temperature = a.temperature,
               .top_p = a.top_p,
               .top_k = a.top_k},
              requests, requests, 1, threads, parts);
  a.bias ? op.measure<true>() : op.measure<false>();
  op.end([&](int64_t b, int, int64_t, const Row& row, const BlockStats* stats, const Known& known, const Team& team,
             LawShared& shared) { draft_row(a, b, row, stats, known, team, shared); });
}

extern "C" void verify_host(int64_t requests, int64_t rows, int64_t vocab, int64_t drafts, int64_t draft_request,
                            int64_t draft_step, void* const* p, int threads, int parts, int each) {
  const Verify a = {requests,
                    rows,
                    vocab,
                    drafts,
                    at<float>(p, 0),
                    at<float>(p, 1),
                    draft_request,
                    draft_step,
                    at<int64_t>(p, 2),
                    at<float>(p, 3),
                    at<float>(p, 4),
                    at<float>(p, 5),
                    at<double>(p, 6),
                    at<int64_t>(p, 7),
                    at<int32_t>(p, 8),
                    at<int64_t>(p, 9),
                    at<float>(p, 10),
                    at<float>(p, 11),
                    at<int32_t>(p, 12),
                    at<int64_t>(p, 13),
                    at<int32_t>(p, 14),
                    at<uint8_t>(p, 15),
                    at<int64_t>(p, 16),
                    at<float>(p, 17),
                    at<int32_t>(p, 18),
                    at<int32_t>(p, 19),
                    at<uint8_t>(p, 20),
                    at<int64_t>(p, 21)};
  std::vector<Decision> decisions(static_cast<size_t>(rows));
  Launches op({.logits = at<float>(p, 0),
               .row_stride = vocab,
               .vocab = vocab,
               .temperature = a.temperature,
               .top_p = a.top_p,
               .top_k = a.top_k,
               .cu_rows = a.cu_rows},
              rows, requests, static_cast<int>(drafts) + 1, threads, parts);
  if (each > 0) {
    verify_in_one_flow(a, op, decisions, each);
    return;
  }
  op.measure<false>();
  op.end([&](int64_t r, int place, int64_t index, const Row& row, const BlockStats* stats, const Known& known,
             const Team& team,
             LawShared& shared) { decide_row(a, decisions.data(), r, place, index, row, stats, known, team, shared); });
  by_team<LawShared>(threads, requests * parts, [&](int64_t i, const Team& team, LawShared& shared) {
    const EndInputs inputs(a, i / parts, team.lane);
    end_request(a, op.rows, decisions.data(), i / parts, inputs, static_cast<int>(i % parts), parts, team, shared);
  });
}

extern "C" void confidence_host(int64_t requests, int64_t drafts, int64_t hidden_size, int64_t markov_size,
                                int64_t hidden_request, int64_t hidden_draft, void* const* p, int vectors) {
  const ConfidenceHead a = {requests,        drafts,          hidden_size,     markov_size,     at<float>(p, 0),
                            hidden_request,  hidden_draft,    at<float>(p, 1), at<float>(p, 2), at<float>(p, 3),
                            at<float>(p, 4), at<float>(p, 5), at<float>(p, 6)};
  float shared[kMostHeads];
  for (int64_t b = 0; b < requests; ++b)
    run_block(static_cast<int>(32 * drafts), nullptr, 0, [&] { confidence_request(a, b, vectors != 0, shared); });
}
