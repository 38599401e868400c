// One way to spread rows over threads: whole rows only, so that a row's arithmetic never depends on the schedule.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace kernel_core {

// Calls f(i) for i in [0, n). `cost` is a rough count of operations an item; small jobs stay on one thread,
// where waking the others would cost more than the work.
template <typename F>
inline void parallel_for(int64_t n, int64_t cost, F&& f) {
  // Some tens of microseconds: on a machine with other work a barrier may cost milliseconds, and a decode step has
  // hundreds of small calls.
  constexpr int64_t kWorthAThread = 1 << 18;
  const int64_t want = std::max<int64_t>(1, n * cost / kWorthAThread);
  const int threads = static_cast<int>(std::min<int64_t>({want, n, omp_get_max_threads()}));
  if (threads <= 1 || omp_in_parallel()) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  // Short items travel together, or handing them out would cost more than they do.
  const int64_t fair = std::max<int64_t>(1, n / (8 * threads));
  const int64_t chunk = std::clamp<int64_t>(kWorthAThread / 4 / std::max<int64_t>(cost, 1), 1, fair);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
  for (int64_t i = 0; i < n; ++i) f(i);
}

}  // namespace kernel_core
