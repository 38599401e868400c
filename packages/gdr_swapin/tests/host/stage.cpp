// The staging plan on the host, its queue's calls answered by the caller.
#include "cuda/stage_plan.hpp"

using gdr_swapin::cuda::StagePlan;

extern "C" {

struct Calls {
  int (*before)(int64_t stream, int64_t part);
  int (*copy)(int64_t stream, const uint64_t* to, const uint64_t* from, const uint64_t* sizes, int64_t n);
  int (*rows)(int64_t stream, uint64_t to, uint64_t to_pitch, uint64_t from, uint64_t from_pitch, uint64_t width,
              uint64_t n);
  int (*after)(int64_t stream, int64_t part);
  int (*deal)(int64_t part, uint64_t at, int64_t start, int64_t n);
};

int stage_host(const StagePlan* plan, Calls* calls, int64_t* rounds) {
  *rounds = 0;
  return gdr_swapin::cuda::sound(*plan) ? gdr_swapin::cuda::run_stage(*plan, *calls, rounds) : -1;
}
}
