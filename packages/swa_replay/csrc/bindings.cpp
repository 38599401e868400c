#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/window.hpp"
#include "kernel_core/bindings.hpp"

namespace py = pybind11;
using kernel_core::AttentionArgs;
using kernel_core::NoGil;
using kernel_core::pointer;

namespace swa_replay {
namespace {

void window_attention(uintptr_t q, uintptr_t new_rows, uintptr_t ring, uintptr_t ring_slot, uintptr_t cu_seqlens,
                      uintptr_t start_pos, uintptr_t lower, uintptr_t sink, uintptr_t rope, uintptr_t out, int64_t rows,
                      int64_t heads, int64_t dim, int64_t batch, int64_t slots, int64_t ring_rows, int64_t window,
                      int64_t rope_dim, float scale, bool packed, bool block) {
  AttentionArgs a{};
  a.q = pointer<const float>(q);
  a.out = pointer<float>(out);
  a.rows = rows, a.heads = heads, a.dim = dim, a.packed = packed;
  a.cu_seqlens = pointer<const int32_t>(cu_seqlens);
  a.start_pos = pointer<const int64_t>(start_pos);
  a.batch = batch;
  a.new_rows = pointer<const uint8_t>(new_rows);
  a.ring = pointer<const uint8_t>(ring);
  a.slots = slots, a.ring_rows = ring_rows;
  a.ring_slot = pointer<const int32_t>(ring_slot);
  a.lower = pointer<const int64_t>(lower);
  a.window = window, a.block = block;
  a.sink = pointer<const float>(sink);
  a.rope = pointer<const float>(rope);
  a.rope_dim = rope_dim, a.scale = scale;
  kernel_core::check_attention(a);
#if defined(KERNEL_CORE_HAS_AMX)
  if (kernel_core::active_isa() >= kernel_core::Isa::amx) return amx::window_attention(a);
#endif
  KERNEL_CORE_PICK(window_attention)(a);
}

// Two requests that store into one ring would overwrite each other.
void check_distinct(const int32_t* cu_seqlens, const int32_t* ring_slot, int64_t batch, int64_t slots) {
  std::vector<bool> taken(static_cast<size_t>(slots));
  for (int64_t b = 0; b < batch; ++b) {
    if (cu_seqlens[b + 1] == cu_seqlens[b]) continue;
    if (taken[ring_slot[b]])
      kernel_core::detail::fail("ring_slot" + kernel_core::detail::at(b), ring_slot[b], "a slot of its own");
    taken[ring_slot[b]] = true;
  }
}

void store_window(uintptr_t new_rows, uintptr_t ring, uintptr_t ring_slot, uintptr_t cu_seqlens, uintptr_t start_pos,
                  uintptr_t floor, int64_t rows, int64_t row_bytes, int64_t batch, int64_t slots, int64_t ring_rows) {
  const auto* from = pointer<const uint8_t>(new_rows);
  auto* to = pointer<uint8_t>(ring);
  const auto* slot = pointer<const int32_t>(ring_slot);
  const auto* cu = pointer<const int32_t>(cu_seqlens);
  const auto* start = pointer<const int64_t>(start_pos);
  const auto* lowest = pointer<const int64_t>(floor);
  kernel_core::check_batch(cu, start, slot, batch, rows, slots);
  check_distinct(cu, slot, batch, slots);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = start[b] + cu[b + 1] - cu[b];
    const int64_t first = std::max({start[b], end - ring_rows, lowest[b]});
    for (int64_t p = first; p < end; ++p) {
      std::memcpy(to + (slot[b] * ring_rows + p % ring_rows) * row_bytes, from + (cu[b] + p - start[b]) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  }
}

}  // namespace
}  // namespace swa_replay

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
  m.def("window_attention", &swa_replay::window_attention, NoGil());
  m.def("store_window", &swa_replay::store_window, NoGil());
}
