// The selection kernel's own code on host threads.
#include "threads.hpp"
#include "topk.cuh"

using mla_fp4::sm90::Topk;
using mla_fp4::sm90::TopkConfig;
using mla_fp4::sm90::TopkShared;

template <typename C>
int select(const float* scores, int length, int k, int32_t* out) {
  auto shared = std::make_unique<TopkShared<C>>();
  std::memset(static_cast<void*>(shared.get()), 0xCD, sizeof(*shared));
  int count = -1;
  run_block(C::kThreads, reinterpret_cast<uint8_t*>(shared.get()), 0, [&] {
    const int chosen = Topk<C>(*shared, k).run({scores, length});
    if (threadIdx.x == 0) count = chosen;
  });
  std::copy_n(shared->sorted, count, out);
  return count;
}

// `scores` is readable up to the next multiple of four entries
extern "C" int select_row(const float* scores, int length, int k, bool wide, int32_t* out) {
  return wide ? select<TopkConfig<2048, 8192, 1024, 1>>(scores, length, k, out)
              : select<TopkConfig<512, 4096, 512, 2>>(scores, length, k, out);
}
