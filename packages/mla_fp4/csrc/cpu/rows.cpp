#include "cpu/rows.hpp"

#include <vector>

#include "cpu/norm_row.hpp"
#include "kernel_core/encode.hpp"
#include "kernel_core/parallel.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

namespace {

void write_row(const float* x, const RowArgs& a, uint8_t* out) {
  switch (a.format) {
    case RowFormat::main:
      return encode_main_row(x, out, a.d);
    case RowFormat::window:
      return encode_window_row(x, out, a.d);
    case RowFormat::index:
      return encode_mxfp4_row(x, out, out + a.d / 2, a.d);
    case RowFormat::float32:
      std::memcpy(out, x, static_cast<size_t>(a.d) * sizeof(float));
  }
}

}  // namespace

void kv_rows(const RowArgs& a) {
  kernel_core::parallel_for(a.rows, a.d * 8, [&](int64_t row) {
    static thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(a.d));
    float* y = scratch.data();
    norm_row(a.x + row * a.d, a.weight, a.eps, y, a.d);
    if (a.round_bf16) round_row_bf16(y, a.d);
    if (a.rope) {
      float* turned = y + a.d - a.rope_dim;
      rotate_row(turned, a.rope + row * a.rope_dim, a.rope_dim, false);
      if (a.round_bf16) round_row_bf16(turned, a.rope_dim);  // the other channels are rounded already
    }
    write_row(y, a, a.out + row * a.row_bytes);
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
