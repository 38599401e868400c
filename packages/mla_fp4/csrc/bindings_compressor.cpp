#include <cstring>
#include <vector>

#include "bindings.hpp"
#include "cpu/compressor.hpp"
#include "geometry.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

namespace mla_fp4 {
namespace {

int64_t count_groups(uintptr_t cu_address, uintptr_t start_address, int64_t batch, int64_t rows) {
  const auto* cu = pointer<const int32_t>(cu_address);
  const auto* start = pointer<const int64_t>(start_address);
  check_cu_seqlens(cu, batch, rows);
  int64_t groups = 0;
  for (int64_t b = 0; b < batch; ++b) {
    if (start[b] < 0) check_range("start_pos", b, start[b], 0, INT64_MAX);
    const int64_t end = start[b] + cu[b + 1] - cu[b];
    groups += end / 2 - start[b] / 2;
  }
  return groups;
}

// Offsets were checked by count_groups.
void compress(uintptr_t kv_address, uintptr_t gate_address, uintptr_t tail_address, uintptr_t slot_address,
              uintptr_t cu_address, uintptr_t start_address, uintptr_t out, int64_t batch, int64_t rows, int64_t d,
              int64_t slots, int64_t ring) {
  const auto* kv = pointer<const float>(kv_address);
  const auto* gate = pointer<const float>(gate_address);
  auto* tail = pointer<float>(tail_address);
  const auto* slot = pointer<const int32_t>(slot_address);
  const auto* cu = pointer<const int32_t>(cu_address);
  const auto* start = pointer<const int64_t>(start_address);
  const auto tail_row = [&](int64_t b, int64_t position) { return tail + (slot[b] * ring + position % ring) * 2 * d; };

  std::vector<Pair> pairs;
  pairs.reserve(static_cast<size_t>(rows / 2 + batch));
  for (int64_t b = 0; b < batch; ++b) {
    if (cu[b] == cu[b + 1]) continue;
    check_range("tail_slot", b, slot[b], 0, slots - 1);
    for (int64_t row = cu[b] + (start[b] % 2 ? 0 : 1); row < cu[b + 1]; row += 2) {
      const float* before = row == cu[b] ? tail_row(b, start[b] - 1) : nullptr;
      pairs.push_back({before ? before : gate + (row - 1) * d, before ? before + d : kv + (row - 1) * d, gate + row * d,
                       kv + row * d});
    }
  }
  KERNEL_CORE_PICK(pool_pairs)({pairs.data(), pointer<float>(out), static_cast<int64_t>(pairs.size()), d});

  const size_t bytes = static_cast<size_t>(d) * sizeof(float);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t count = cu[b + 1] - cu[b];
    for (int64_t i = count > ring ? count - ring : 0; i < count; ++i) {
      float* row = tail_row(b, start[b] + i);
      std::memcpy(row, gate + (cu[b] + i) * d, bytes);
      std::memcpy(row + d, kv + (cu[b] + i) * d, bytes);
    }
  }
}

}  // namespace
}  // namespace mla_fp4

void bind_compressor(py::module_& m) {
  m.def("count_groups", &mla_fp4::count_groups, NoGil());
  m.def("compress", &mla_fp4::compress, NoGil());
}
