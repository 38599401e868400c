// Rows of a matrix through the codecs of encode.hpp and decode.hpp, compiled for each instruction set.
#include "cpu/formats.hpp"

#include "kernel_core/decode.hpp"
#include "kernel_core/encode.hpp"
#include "kernel_core/parallel.hpp"

namespace kernel_core {
namespace KERNEL_CORE_ISA {

void quantize_main(const float* x, uint8_t* rows, int64_t count, int64_t width) {
  const int64_t bytes = width / 2 + width / 16;
  parallel_for(count, 4 * width, [&](int64_t r) { encode_main_row(x + r * width, rows + r * bytes, width); });
}

void dequantize_main(const uint8_t* rows, float* x, int64_t count, int64_t width) {
  const int64_t bytes = width / 2 + width / 16;
  parallel_for(count, width, [&](int64_t r) { decode_main_row(rows + r * bytes, x + r * width, width); });
}

void quantize_mxfp8(const float* x, uint8_t* codes, uint8_t* scales, int64_t count, int64_t width, int64_t code_stride,
                    int64_t scale_stride) {
  parallel_for(count, 4 * width, [&](int64_t r) {
    encode_mxfp8_row(x + r * width, codes + r * code_stride, scales + r * scale_stride, width);
  });
}

void dequantize_mxfp8(const uint8_t* codes, const uint8_t* scales, float* x, int64_t count, int64_t width,
                      int64_t code_stride, int64_t scale_stride) {
  parallel_for(count, width, [&](int64_t r) {
    decode_mxfp8_row(codes + r * code_stride, scales + r * scale_stride, x + r * width, width);
  });
}

void quantize_mxfp4(const float* x, uint8_t* codes, uint8_t* scales, int64_t count, int64_t width, int64_t code_stride,
                    int64_t scale_stride) {
  parallel_for(count, 4 * width, [&](int64_t r) {
    encode_mxfp4_row(x + r * width, codes + r * code_stride, scales + r * scale_stride, width);
  });
}

void dequantize_mxfp4(const uint8_t* codes, const uint8_t* scales, float* x, int64_t count, int64_t width,
                      int64_t code_stride, int64_t scale_stride) {
  parallel_for(count, width, [&](int64_t r) {
    decode_mxfp4_row(codes + r * code_stride, scales + r * scale_stride, x + r * width, width);
  });
}

namespace {
// Edge tiles are padded with zeros, which change neither amax nor the other codes.
void encode_tile(const float* w, uint8_t* codes, uint8_t* scale, int64_t stride, int64_t h, int64_t v) {
  alignas(64) float tile[32 * 32] = {};
  alignas(64) uint8_t bytes[32 * 32];
  for (int64_t r = 0; r < h; ++r) std::memcpy(tile + r * 32, w + r * stride, v * sizeof(float));
  *scale = encode_ue8m0(at_least(amax(tile, 32 * 32), kWindowFloor) / 448.0f);
  if (*scale == 255) {
    std::memset(bytes, 0x7F, sizeof bytes);
  } else {
    encode_e4m3_scaled(tile, 1.0f / decode_ue8m0(*scale), bytes, 32 * 32);
  }
  for (int64_t r = 0; r < h; ++r) std::memcpy(codes + r * stride, bytes + r * 32, v);
}
}  // namespace

void quantize_fp8_block(const float* w, uint8_t* codes, uint8_t* scales, int64_t rows, int64_t cols) {
  const int64_t tiles = (cols + 31) / 32;
  parallel_for((rows + 31) / 32, 128 * cols, [&](int64_t t) {
    for (int64_t c = 0; c < tiles; ++c) {
      const int64_t at = t * 32 * cols + c * 32;
      const int64_t h = rows - t * 32 < 32 ? rows - t * 32 : 32, v = cols - c * 32 < 32 ? cols - c * 32 : 32;
      encode_tile(w + at, codes + at, scales + t * tiles + c, cols, h, v);
    }
  });
}

void dequantize_fp8_block(const uint8_t* codes, const uint8_t* scales, float* w, int64_t rows, int64_t cols) {
  const int64_t tiles = (cols + 31) / 32;
  parallel_for(rows, cols, [&](int64_t r) {
    for (int64_t c = 0; c < tiles; ++c) {
      const float scale = decode_ue8m0(scales[r / 32 * tiles + c]);
      const int64_t from = c * 32, to = cols - from < 32 ? cols : from + 32;
      float* out = w + r * cols;
      decode_e4m3(codes + r * cols + from, out + from, to - from);
      for (int64_t i = from; i < to; ++i) out[i] *= scale;
    }
  });
}

void encode_elements(int format, const float* x, uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    codes[i] = format == 0 ? encode_e2m1(x[i]) : format == 1 ? encode_e4m3(x[i]) : encode_ue8m0(x[i]);
}

}  // namespace KERNEL_CORE_ISA
}  // namespace kernel_core
