// The CUDA module: device pointers, sizes and a stream as integers. Nothing here waits for the device.
#include <pybind11/pybind11.h>

#include "cuda/compress.hpp"
#include "cuda/kv_rows.hpp"
#include "cuda/norm_rope.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;

void bind_attention(py::module_& m);
void bind_index(py::module_& m);
void bind_window(py::module_& m);

namespace {

using namespace mla_fp4::cuda;

// 0 for float32, 1 for bfloat16
Dtype dtype(int number) {
  if (number != 0 && number != 1) throw std::invalid_argument("dtype: got " + std::to_string(number));
  return static_cast<Dtype>(number);
}

void bind_rows(py::module_& m) {
  m.def(
      "norm_rope",
      [](uintptr_t x, uintptr_t weight, uintptr_t rope, uintptr_t out, int64_t rows, int64_t group, int64_t d,
         int64_t rope_dim, float eps, bool inverse, int in, int to, uintptr_t stream) {
        check(norm_rope({pointer<const void>(x), pointer<const float>(weight), pointer<const float>(rope),
                         pointer<void>(out), rows, group, d, rope_dim, eps, inverse, dtype(in), dtype(to)},
                        as_stream(stream)),
              "norm_rope");
      },
      NoGil(), py::arg("x"), py::arg("weight"), py::arg("rope"), py::arg("out"), py::arg("rows"), py::arg("group"),
      py::arg("d"), py::arg("rope_dim"), py::arg("eps"), py::arg("inverse"), py::arg("in_dtype"), py::arg("out_dtype"),
      py::arg("stream"));
  m.def(
      "kv_rows",
      [](uintptr_t x, uintptr_t weight, uintptr_t rope, uintptr_t slots, uintptr_t out, int64_t rows, int64_t d,
         int64_t rope_dim, int64_t capacity, int64_t rows_per_block, float eps, int format, bool round_bf16, int in,
         uintptr_t stream) {
        check(kv_rows({pointer<const void>(x), pointer<const float>(weight), pointer<const float>(rope),
                       pointer<const int64_t>(slots), pointer<uint8_t>(out), rows, d, rope_dim, capacity,
                       rows_per_block, eps, static_cast<RowFormat>(format), round_bf16, dtype(in)},
                      as_stream(stream)),
              "kv_rows");
      },
      NoGil(), py::arg("x"), py::arg("weight"), py::arg("rope"), py::arg("slots"), py::arg("out"), py::arg("rows"),
      py::arg("d"), py::arg("rope_dim"), py::arg("capacity"), py::arg("rows_per_block"), py::arg("eps"),
      py::arg("format"), py::arg("round_bf16"), py::arg("in_dtype"), py::arg("stream"));
  m.def(
      "store_rows",
      [](uintptr_t from, uintptr_t slots, uintptr_t out, int64_t rows, int64_t code_bytes, int64_t scale_bytes,
         int64_t rows_per_block, int64_t capacity, uintptr_t stream) {
        check(store_rows({pointer<const uint8_t>(from), pointer<const int64_t>(slots), pointer<uint8_t>(out), rows,
                          code_bytes, scale_bytes, rows_per_block, capacity},
                         as_stream(stream)),
              "store_rows");
      },
      NoGil(), py::arg("rows_address"), py::arg("slots"), py::arg("out"), py::arg("rows"), py::arg("code_bytes"),
      py::arg("scale_bytes"), py::arg("rows_per_block"), py::arg("capacity"), py::arg("stream"));
}

void bind_compress(py::module_& m) {
  m.def(
      "compress",
      [](uintptr_t kv, uintptr_t gate, uintptr_t tail, uintptr_t slot, uintptr_t cu, uintptr_t start, uintptr_t out,
         int64_t batch, int64_t rows, int64_t d, int64_t slots, int64_t ring, int64_t groups, uintptr_t stream) {
        check(compress({pointer<const float>(kv), pointer<const float>(gate), pointer<float>(tail),
                        pointer<const int32_t>(slot), pointer<const int32_t>(cu), pointer<const int64_t>(start),
                        pointer<float>(out), batch, rows, d, slots, ring, groups},
                       as_stream(stream)),
              "compress");
      },
      NoGil(), py::arg("kv"), py::arg("gate"), py::arg("tail"), py::arg("tail_slot"), py::arg("cu_seqlens"),
      py::arg("start_pos"), py::arg("out"), py::arg("batch"), py::arg("rows"), py::arg("d"), py::arg("slots"),
      py::arg("ring"), py::arg("groups"), py::arg("stream"));
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  bind_rows(m);
  bind_compress(m);
#if defined(MLA_FP4_CUDA_ATTENTION)
  bind_attention(m);
#endif
#if defined(MLA_FP4_CUDA_INDEX)
  bind_index(m);
#endif
#if defined(MLA_FP4_CUDA_WINDOW)
  bind_window(m);
#endif
}
