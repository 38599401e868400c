// Marks of time for one question: where does a launch spend it? Nothing of it is in a kernel unless MEGA_MOE_TRACE is
// defined when it is compiled; marks then go behind the counters in ExpertsParams::state, which are not zero after it.
#pragma once

#include "expert_params.hpp"
#include "expert_ptx.cuh"

namespace mega_moe::sm90 {

// Clocks of the SM since its CTA began; kBegan and kEnded are nanoseconds of the device.
enum Mark : int {
  kBegan,         // nanoseconds
  kPlanned,       // experts' rows are known, barriers stand
  kAsked,         // the first weight copy is asked for
  kRowsFound,     // an image warp has the rows of its first item
  kFirstFull,     // the first stage is there
  kFirstItem,     // the first item is stored
  kFirstsStored,  // the last item of the first product is stored
  kSecondKnown,   // the first item of the second product begins
  kSecondFull,    // its first stage is there
  kLastStored,    // the last item is stored
  kSumBegins,     // everybody's are
  kSumEnds,
  kEnded,  // nanoseconds
  kMarks = 16
};
inline constexpr int kTraceAt = 1 << 14;  // word of state

#if defined(MEGA_MOE_TRACE) && defined(__CUDACC__)

__device__ __forceinline__ void put_mark(const ExpertsParams& p, Mark which, uint32_t value) {
  p.state[kTraceAt + static_cast<int>(blockIdx.x) * kMarks + which] = static_cast<int32_t>(value);
}
__device__ __forceinline__ uint32_t clock_now() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(v)::"memory");
  return v;
}
__device__ __forceinline__ uint32_t nanoseconds() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(v)::"memory");
  return v;
}
// One thread of a role.
__device__ __forceinline__ void mark(const ExpertsParams& p, Mark which, bool mine) {
  if (mine) put_mark(p, which, which == kBegan || which == kEnded ? nanoseconds() : clock_now());
}
__device__ __forceinline__ void mark_clock_zero(const ExpertsParams& p, bool mine) {
  if (mine) put_mark(p, static_cast<Mark>(kMarks - 1), clock_now());
}

#else

KC_HD void mark(const ExpertsParams&, Mark, bool) {}
KC_HD void mark_clock_zero(const ExpertsParams&, bool) {}

#endif

}  // namespace mega_moe::sm90
