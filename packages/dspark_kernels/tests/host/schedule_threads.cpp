// The scheduler's own code on host threads.
#include "threads.hpp"

#include "cuda/sm90/schedule.cuh"

using namespace dspark_kernels;
using namespace dspark_kernels::cuda;

namespace {

template <int kDrafts>
void run(const Schedule& a, int index, int blocks, int threads, ScheduleShared& shared) {
  if (a.drafts == kDrafts) {
    schedule_block<kDrafts>(a, index, blocks, threads, shared);
  } else if constexpr (kDrafts < kMostDrafts) {
    run<kDrafts + 1>(a, index, blocks, threads, shared);
  }
}

}  // namespace

extern "C" void schedule_host(int64_t requests, int64_t drafts, int64_t capacity, const void* const* in, int64_t budget,
                              void* const* out, int threads) {
  const Schedule a = {requests,
                      drafts,
                      capacity,
                      static_cast<const float*>(in[0]),
                      static_cast<const int64_t*>(in[1]),
                      static_cast<const int64_t*>(in[2]),
                      static_cast<const int32_t*>(in[3]),
                      static_cast<const int32_t*>(in[4]),
                      static_cast<const int32_t*>(in[5]),
                      budget,
                      static_cast<const int32_t*>(in[6]),
                      static_cast<int32_t*>(out[0]),
                      static_cast<int32_t*>(out[1]),
                      static_cast<float*>(out[2]),
                      static_cast<int32_t*>(out[3]),
                      static_cast<int32_t*>(out[4]),
                      static_cast<int32_t*>(out[5]),
                      static_cast<int32_t*>(out[6]),
                      static_cast<int64_t*>(out[7]),
                      static_cast<int64_t*>(out[8]),
                      static_cast<int32_t*>(out[9]),
                      static_cast<int32_t*>(out[10])};
  const auto shared = std::make_unique<ScheduleShared>();
  const int blocks = static_cast<int>((requests + 31) / 32);
  for (int index = 0; index < blocks; ++index) {
    std::memset(static_cast<void*>(shared.get()), 0x5A, sizeof(ScheduleShared));
    run_block(threads, reinterpret_cast<uint8_t*>(shared.get()), static_cast<unsigned>(index),
              [&] { run<1>(a, index, blocks, threads, *shared); });
  }
}
