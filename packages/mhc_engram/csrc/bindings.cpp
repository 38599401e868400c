#include <pybind11/pybind11.h>

#include "kernel_core/bindings.hpp"
#include "mhc_engram.hpp"

using kernel_core::NoGil;
using kernel_core::pointer;
using namespace mhc_engram;

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);

  // Addresses are 0 for a part that is left out; the order follows HcStep.
  m.def(
      "hc_step",
      [](int64_t tokens, int64_t channels, uintptr_t streams, uintptr_t y, uintptr_t post, uintptr_t comb, uintptr_t fn,
         uintptr_t base, uintptr_t scale, float norm_eps, float hc_eps, int iters, uintptr_t pre_out,
         uintptr_t post_out, uintptr_t comb_out, uintptr_t pre_mix, uintptr_t norm_weight, float eps, uintptr_t mixed) {
        HcStep a;
        a.tokens = tokens;
        a.channels = channels;
        a.streams = pointer<float>(streams);
        a.y = pointer<float>(y);
        a.post = pointer<float>(post);
        a.comb = pointer<float>(comb);
        a.fn = pointer<float>(fn);
        a.base = pointer<float>(base);
        a.scale = pointer<float>(scale);
        a.norm_eps = norm_eps;
        a.hc_eps = hc_eps;
        a.iters = iters;
        a.pre_out = pointer<float>(pre_out);
        a.post_out = pointer<float>(post_out);
        a.comb_out = pointer<float>(comb_out);
        a.pre_mix = pointer<float>(pre_mix);
        a.norm_weight = pointer<float>(norm_weight);
        a.eps = eps;
        a.mixed = pointer<float>(mixed);
        KERNEL_CORE_PICK(hc_step)(a);
      },
      NoGil());

  m.def(
      "engram_inject",
      [](int64_t tokens, int64_t n, int64_t channels, uintptr_t streams, uintptr_t kv, uintptr_t qk_weight,
         uintptr_t dead, float eps) {
        KERNEL_CORE_PICK(engram_inject)
        ({tokens, channels, pointer<float>(streams), pointer<float>(kv), pointer<float>(qk_weight),
          pointer<uint8_t>(dead), eps, n});
      },
      NoGil());

  m.def(
      "engram_gather",
      [](int64_t count, int64_t dim, uintptr_t table, uintptr_t scale, uintptr_t rows, uintptr_t out) {
        KERNEL_CORE_PICK(engram_gather)
        ({count, dim, pointer<uint8_t>(table), pointer<uint8_t>(scale), pointer<int64_t>(rows), pointer<float>(out)});
      },
      NoGil());

  m.def(
      "first_row_outside",
      [](uintptr_t rows, int64_t count, int64_t table_rows) {
        return first_row_outside(pointer<int64_t>(rows), count, table_rows);
      },
      NoGil());

  // Returns the name of an argument with values that cannot be, or None; only then anything is written.
  m.def(
      "engram_rows",
      [](int64_t requests, int64_t tokens, int64_t shifts, int64_t heads, uintptr_t mapped, uintptr_t dead,
         uintptr_t history, uintptr_t cu_seqlens, uintptr_t multipliers, uintptr_t primes, uintptr_t offsets,
         int64_t pad_mapped, uintptr_t rows) {
        const EngramRows a{requests,
                           tokens,
                           shifts,
                           heads,
                           pointer<int64_t>(mapped),
                           pointer<uint8_t>(dead),
                           pointer<int64_t>(history),
                           pointer<int32_t>(cu_seqlens),
                           pointer<int64_t>(multipliers),
                           pointer<int64_t>(primes),
                           pointer<int64_t>(offsets),
                           pad_mapped,
                           pointer<int64_t>(rows)};
        const char* problem = engram_rows_problem(a);
        if (!problem) engram_rows(a);
        return problem;
      },
      NoGil());
}
