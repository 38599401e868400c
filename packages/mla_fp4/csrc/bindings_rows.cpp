#include <cstring>

#include "bindings.hpp"
#include "cpu/rows.hpp"
#include "geometry.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

namespace mla_fp4 {
namespace {

void check_slots(const int64_t* slots, int64_t rows, int64_t capacity) {
  for (int64_t i = 0; i < rows; ++i) check_range("slots", i, slots[i], -1, capacity - 1);
}

// Rows are copied in order, so of two rows with one slot the later stays.
void store_rows(uintptr_t rows_address, uintptr_t pages_address, uintptr_t slots_address, int64_t rows,
                int64_t row_bytes, int64_t capacity) {
  const auto* from = pointer<const uint8_t>(rows_address);
  auto* pages = pointer<uint8_t>(pages_address);
  const auto* slots = pointer<const int64_t>(slots_address);
  check_slots(slots, rows, capacity);
  for (int64_t i = 0; i < rows; ++i)
    if (slots[i] >= 0) std::memcpy(pages + slots[i] * row_bytes, from + i * row_bytes, static_cast<size_t>(row_bytes));
}

// A page holds the codes of all its rows, then their scales.
void store_split_rows(uintptr_t rows_address, uintptr_t pages_address, uintptr_t slots_address, int64_t rows,
                      int64_t code_bytes, int64_t scale_bytes, int64_t rows_per_block, int64_t blocks) {
  const auto* from = pointer<const uint8_t>(rows_address);
  auto* pages = pointer<uint8_t>(pages_address);
  const auto* slots = pointer<const int64_t>(slots_address);
  check_slots(slots, rows, blocks * rows_per_block);
  const int64_t row_bytes = code_bytes + scale_bytes;
  for (int64_t i = 0; i < rows; ++i) {
    if (slots[i] < 0) continue;
    uint8_t* page = pages + slots[i] / rows_per_block * rows_per_block * row_bytes;
    const int64_t offset = slots[i] % rows_per_block;
    const uint8_t* row = from + i * row_bytes;
    std::memcpy(page + offset * code_bytes, row, static_cast<size_t>(code_bytes));
    std::memcpy(page + rows_per_block * code_bytes + offset * scale_bytes, row + code_bytes,
                static_cast<size_t>(scale_bytes));
  }
}

}  // namespace
}  // namespace mla_fp4

void bind_rows(py::module_& m) {
  m.def(
      "kv_rows",
      [](uintptr_t x, uintptr_t weight, uintptr_t rope, uintptr_t out, int64_t rows, int64_t d, int64_t rope_dim,
         int64_t row_bytes, float eps, int format, bool round_bf16) {
        using namespace mla_fp4;
        KERNEL_CORE_PICK(kv_rows)
        ({pointer<const float>(x), pointer<const float>(weight), pointer<const float>(rope), pointer<uint8_t>(out),
          rows, d, rope_dim, row_bytes, eps, static_cast<RowFormat>(format), round_bf16});
      },
      NoGil());
  m.def("store_rows", &mla_fp4::store_rows, NoGil());
  m.def("store_split_rows", &mla_fp4::store_split_rows, NoGil());
}
