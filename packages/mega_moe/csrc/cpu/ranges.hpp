// Work items over threads in contiguous runs: a thread walks weights in memory order and keeps its set-up.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace mega_moe {

// Calls f(begin, end) until all of [0, n) is done. `cycles` is a rough cost of one item; a job too small for the
// cost of waking threads stays on the calling one. Which thread takes a run has no influence on results.
template <typename F>
inline void for_ranges(int64_t n, int64_t cycles, F&& f) {
  constexpr int64_t kWorthAThread = 100000;  // as kernel_core::parallel_for, which says why
  const int64_t want = std::max<int64_t>(1, n * cycles / kWorthAThread);
  const int threads = static_cast<int>(std::min<int64_t>({want, n, omp_get_max_threads()}));
  if (n == 0) return;
  if (threads <= 1 || omp_in_parallel()) {
    f(int64_t{0}, n);
    return;
  }
  // Several runs a thread even out cores of unequal speed; short jobs are not cut below one thread's share.
  const int64_t per_thread = std::clamp<int64_t>(n * cycles / threads / (8 * kWorthAThread), 1, 8);
  const int64_t runs = std::min<int64_t>(n, threads * per_thread);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < runs; ++i) f(n * i / runs, n * (i + 1) / runs);
}

}  // namespace mega_moe
