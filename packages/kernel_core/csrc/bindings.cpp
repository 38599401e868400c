#include <pybind11/pybind11.h>

#include "cpu/formats.hpp"
#include "kernel_core/bindings.hpp"

namespace kernel_core {

void bind_ceilings(pybind11::module_& m);

namespace {

using Address = uintptr_t;
using Count = int64_t;

void bind_formats(pybind11::module_& m) {
  m.def(
      "quantize_main",
      [](Address x, Address rows, Count count, Count width) {
        KERNEL_CORE_PICK(quantize_main)(pointer<const float>(x), pointer<uint8_t>(rows), count, width);
      },
      NoGil());
  m.def(
      "dequantize_main",
      [](Address rows, Address x, Count count, Count width) {
        KERNEL_CORE_PICK(dequantize_main)(pointer<const uint8_t>(rows), pointer<float>(x), count, width);
      },
      NoGil());
  m.def(
      "quantize_mxfp8",
      [](Address x, Address codes, Address scales, Count count, Count width, Count code_stride, Count scale_stride) {
        KERNEL_CORE_PICK(quantize_mxfp8)
        (pointer<const float>(x), pointer<uint8_t>(codes), pointer<uint8_t>(scales), count, width, code_stride,
         scale_stride);
      },
      NoGil());
  m.def(
      "dequantize_mxfp8",
      [](Address codes, Address scales, Address x, Count count, Count width, Count code_stride, Count scale_stride) {
        KERNEL_CORE_PICK(dequantize_mxfp8)
        (pointer<const uint8_t>(codes), pointer<const uint8_t>(scales), pointer<float>(x), count, width, code_stride,
         scale_stride);
      },
      NoGil());
  m.def(
      "quantize_mxfp4",
      [](Address x, Address codes, Address scales, Count count, Count width, Count code_stride, Count scale_stride) {
        KERNEL_CORE_PICK(quantize_mxfp4)
        (pointer<const float>(x), pointer<uint8_t>(codes), pointer<uint8_t>(scales), count, width, code_stride,
         scale_stride);
      },
      NoGil());
  m.def(
      "dequantize_mxfp4",
      [](Address codes, Address scales, Address x, Count count, Count width, Count code_stride, Count scale_stride) {
        KERNEL_CORE_PICK(dequantize_mxfp4)
        (pointer<const uint8_t>(codes), pointer<const uint8_t>(scales), pointer<float>(x), count, width, code_stride,
         scale_stride);
      },
      NoGil());
  m.def(
      "quantize_fp8_block",
      [](Address w, Address codes, Address scales, Count rows, Count cols) {
        KERNEL_CORE_PICK(quantize_fp8_block)
        (pointer<const float>(w), pointer<uint8_t>(codes), pointer<uint8_t>(scales), rows, cols);
      },
      NoGil());
  m.def(
      "dequantize_fp8_block",
      [](Address codes, Address scales, Address w, Count rows, Count cols) {
        KERNEL_CORE_PICK(dequantize_fp8_block)
        (pointer<const uint8_t>(codes), pointer<const uint8_t>(scales), pointer<float>(w), rows, cols);
      },
      NoGil());
  m.def(
      "encode_elements",
      [](int format, Address x, Address codes, Count count) {
        KERNEL_CORE_PICK(encode_elements)(format, pointer<const float>(x), pointer<uint8_t>(codes), count);
      },
      NoGil());
}

}  // namespace
}  // namespace kernel_core

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
  kernel_core::bind_formats(m);
  kernel_core::bind_ceilings(m);
}
