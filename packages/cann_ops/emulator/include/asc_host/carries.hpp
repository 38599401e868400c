// 32-bit sums and differences with carries in predicates.
#pragma once

#include "asc_host/registers.hpp"

namespace asc_host {

/// d = a + b + carry, or a - b - 1 + carry; `out` is the carry, which for a difference says that nothing was borrowed.
ASC_PLAIN inline void carry_lanes(vector_bool& out, vector_u32& d, const vector_u32& a, const vector_u32& b,
                                  const vector_bool* carry, bool subtract, const vector_bool& m) {
  vector_bool carries = vector_bool::none();
  vector_u32 r = vector_u32::zeros();
  for (int i = 0; i < vector_u32::N; ++i) {
    if (!active<uint32_t>(m, i)) continue;
    uint64_t in = carry ? carry->get(4 * i) : (subtract ? 1 : 0);
    uint64_t sum = uint64_t(a.v[i]) + (subtract ? uint32_t(~b.v[i]) : b.v[i]) + in;
    r.v[i] = static_cast<uint32_t>(sum);
    carries.set(4 * i, sum >> 32);
  }
  ByteBits inputs = whole_lanes<4>(a.defined) & whole_lanes<4>(b.defined);
  if (carry) inputs = inputs & ~spread<4>(carry->bad);
  r.defined = result_shadow<uint32_t>(inputs, m);
  carries.bad = ~r.defined;
  d = r;
  out = carries;
}

}  // namespace asc_host

ASC_PLAIN inline void asc_add(vector_bool& c, vector_u32& d, vector_u32 a, vector_u32 b, vector_bool m) {
  asc_host::carry_lanes(c, d, a, b, nullptr, false, m);
}
ASC_PLAIN inline void asc_sub(vector_bool& c, vector_u32& d, vector_u32 a, vector_u32 b, vector_bool m) {
  asc_host::carry_lanes(c, d, a, b, nullptr, true, m);
}
ASC_PLAIN inline void asc_addc(vector_bool& c, vector_u32& d, vector_u32 a, vector_u32 b, vector_bool in,
                               vector_bool m) {
  asc_host::carry_lanes(c, d, a, b, &in, false, m);
}
ASC_PLAIN inline void asc_subc(vector_bool& c, vector_u32& d, vector_u32 a, vector_u32 b, vector_bool in,
                               vector_bool m) {
  asc_host::carry_lanes(c, d, a, b, &in, true, m);
}
