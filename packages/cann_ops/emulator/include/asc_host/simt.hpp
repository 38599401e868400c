// SIMT functions: threads in warps of 32, their barriers, shuffles, votes, reductions and atomics.
#pragma once

#include <functional>

#include "asc_host/tags.hpp"

namespace cce {
struct dim3 {
  int x, y, z;
  explicit dim3(int a, int b = 1, int c = 1) : x(a), y(b), z(c) {}
};
}  // namespace cce

struct asc_index3 {
  uint32_t x = 0, y = 0, z = 0;
};
extern uint32_t block_idx;
extern asc_index3 threadIdx, blockDim, blockIdx, gridDim;

namespace asc_host {

void run_threads(cce::dim3 shape, const std::function<void()>& body, const char* name, int line);
void block_barrier();
void warp_barrier();
/// Every thread of the warp that reaches this gives a value; afterwards `warp_value` reads them.
void warp_exchange(uint64_t mine);
uint64_t warp_value(int lane);
uint32_t warp_mask();  // lanes that took part
int lane();
/// An access that other threads may do at the same time.
void atomic_access(void* p, size_t bytes);

template <class T>
ASC_PLAIN inline uint64_t pack(T v) {
  uint64_t u = 0;
  std::memcpy(&u, &v, sizeof v);
  return u;
}
template <class T>
ASC_PLAIN inline T unpack(uint64_t u) {
  T v;
  std::memcpy(&v, &u, sizeof v);
  return v;
}
/// The value of lane `l`, or of this lane where `l` did not take part.
template <class T>
ASC_PLAIN inline T from_lane(T mine, int l) {
  return (l >= 0 && l < 32 && (warp_mask() >> l) & 1) ? unpack<T>(warp_value(l)) : mine;
}

template <class T, class F>
ASC_PLAIN inline T warp_reduce(T mine, F f) {
  warp_exchange(pack(mine));
  bool any = false;
  T r = mine;
  for (int l = 0; l < 32; ++l) {
    if (!((warp_mask() >> l) & 1)) continue;
    T v = unpack<T>(warp_value(l));
    r = any ? f(r, v) : v;
    any = true;
  }
  return r;
}

template <class T, class F>
ASC_PLAIN inline T atomic_update(T* p, F f) {
  atomic_access(p, sizeof(T));
  T old = *p;
  *p = f(old);
  return old;
}

}  // namespace asc_host

inline void asc_syncthreads() { asc_host::block_barrier(); }
inline void asc_threadfence() {}
inline void asc_threadfence_block() {}
inline uint32_t laneid() { return static_cast<uint32_t>(asc_host::lane()); }

template <class T>
ASC_PLAIN inline T asc_shfl_xor(T v, int mask) {
  asc_host::warp_exchange(asc_host::pack(v));
  return asc_host::from_lane(v, asc_host::lane() ^ mask);
}
template <class T>
ASC_PLAIN inline T asc_shfl(T v, int lane) {
  asc_host::warp_exchange(asc_host::pack(v));
  return asc_host::from_lane(v, lane & 31);
}
template <class T>
ASC_PLAIN inline T asc_shfl_up(T v, int distance) {
  asc_host::warp_exchange(asc_host::pack(v));
  return asc_host::from_lane(v, asc_host::lane() - distance);
}
template <class T>
ASC_PLAIN inline T asc_shfl_down(T v, int distance) {
  asc_host::warp_exchange(asc_host::pack(v));
  return asc_host::from_lane(v, asc_host::lane() + distance);
}
template <class T>
  requires(asc_host::kIsInt<T> || asc_host::kIsFloat<T>)
ASC_PLAIN inline T asc_reduce_add(T v) {
  return asc_host::warp_reduce(v, [](T a, T b) ASC_INLINE { return static_cast<T>(a + b); });
}
template <class T>
  requires(asc_host::kIsInt<T> || asc_host::kIsFloat<T>)
ASC_PLAIN inline T asc_reduce_max(T v) {
  return asc_host::warp_reduce(v, [](T a, T b) ASC_INLINE { return a > b ? a : b; });
}
template <class T>
  requires(asc_host::kIsInt<T> || asc_host::kIsFloat<T>)
ASC_PLAIN inline T asc_reduce_min(T v) {
  return asc_host::warp_reduce(v, [](T a, T b) ASC_INLINE { return a < b ? a : b; });
}
ASC_PLAIN inline uint32_t asc_ballot(bool on) {
  asc_host::warp_exchange(on);
  uint32_t r = 0;
  for (int l = 0; l < 32; ++l) {
    if ((asc_host::warp_mask() >> l) & 1) r |= static_cast<uint32_t>(asc_host::warp_value(l) & 1) << l;
  }
  return r;
}
ASC_PLAIN inline uint32_t asc_activemask() {
  asc_host::warp_exchange(0);
  return asc_host::warp_mask();
}

template <class T>
ASC_PLAIN inline T asc_atomic_add(T* p, std::type_identity_t<T> v) {
  return asc_host::atomic_update(p, [v](T old) ASC_INLINE { return static_cast<T>(old + v); });
}
template <class T>
ASC_PLAIN inline T asc_atomic_max(T* p, std::type_identity_t<T> v) {
  return asc_host::atomic_update(p, [v](T old) ASC_INLINE { return old > v ? old : v; });
}
template <class T>
ASC_PLAIN inline T asc_atomic_min(T* p, std::type_identity_t<T> v) {
  return asc_host::atomic_update(p, [v](T old) ASC_INLINE { return old < v ? old : v; });
}

namespace cooperative_groups {
struct coalesced_group {
  void sync() const { asc_host::warp_barrier(); }
};
inline coalesced_group coalesced_threads() { return {}; }
}  // namespace cooperative_groups

namespace asc_host {

/// Calls the SIMT function F with `shape` threads; the Python side puts its name and the line in.
template <auto F, class... A>
inline void call_threads(const char* name, int line, cce::dim3 shape, A... given) {
  run_threads(shape, [=] { F(given...); }, name, line);
}

}  // namespace asc_host

template <auto F, class... A>
inline void asc_vf_call(cce::dim3 shape, A... given) {
  asc_host::call_threads<F>("a SIMT function", 0, shape, given...);
}
