// The device's format functions over arrays, for ctypes.
#include "kernel_core/cuda/formats.cuh"

using namespace kernel_core::cuda;

namespace {

template <typename Row>
void encode_row(const float* x, uint8_t* codes, uint8_t* scales, int64_t width) {
  for (int64_t g = 0; g < width / Row::group; ++g) {
    const float* from = x + g * Row::group;
    uint32_t amax = 0;
    for (int i = 0; i < Row::group; ++i) amax = amax > magnitude_bits(from[i]) ? amax : magnitude_bits(from[i]);
    const GroupScale scale = group_scale(Row{}, amax);
    scales[g] = static_cast<uint8_t>(scale.byte);
    for (int i = 0; i < Row::group; ++i) {
      const int64_t at = (g * Row::group + i) * Row::code_bits;
      const uint32_t code = encode_scaled<Row>(from[i], scale) << at % 8;
      codes[at / 8] = static_cast<uint8_t>(at % 8 ? codes[at / 8] | code : code);
    }
  }
}

}  // namespace

extern "C" {

void decode_e2m1x8(const uint32_t* words, const uint8_t* scales, int ue8m0, uint32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    e2m1x8_scaled(words[i], ue8m0 ? ue8m0_bf16x2(scales[i]) : e4m3_bf16x2(scales[i]), out + 4 * i);
}

void decode_e2m1x2(const uint8_t* bytes, const uint8_t* scales, uint32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = e2m1x2_scaled(bytes[i], e4m3_bf16x2(scales[i]));
}

void decode_e2m1x8_small(const uint32_t* words, uint32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) e2m1x8_small(words[i], out + 4 * i);
}

// The pair, then its low and its high half twice
void decode_scale_pairs(const uint16_t* pairs, uint32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[3 * i] = e4m3x2_large(pairs[i]);
    out[3 * i + 1] = low_twice(out[3 * i]);
    out[3 * i + 2] = high_twice(out[3 * i]);
  }
}

void floor_log2s(const uint32_t* x, int32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = floor_log2(x[i]);
}

void e2m1_to_e4m3(const uint32_t* words, uint32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) e2m1x8_e4m3(words[i], out + 2 * i);
}

void decode_e4m3x4(const uint32_t* words, const uint8_t* scales, int folded, uint32_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (folded)
      e4m3x4_folded(words[i], mxfp8_factor(scales[i]), out + 2 * i);
    else
      e4m3x4_scaled(words[i], mxfp8_scale(scales[i]), out + 2 * i);
  }
}

void decode_scales(const uint8_t* bytes, int ue8m0, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = ue8m0 ? ue8m0_float(bytes[i]) : e4m3_float(bytes[i]);
}

void round_to_bf16(const float* x, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint16_t>(float_bf16(x[i]));
}

void encode_elements(int format, const float* x, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = static_cast<uint8_t>(format == 0   ? encode_e2m1(x[i])
                                  : format == 1 ? encode_e4m3(x[i])
                                                : encode_ue8m0(x[i]));
}

void encode_rows(int format, const float* x, uint8_t* out, int64_t rows, int64_t width) {
  const int64_t codes = format == 1 ? width : width / 2, scales = format == 0 ? width / 16 : width / 32;
  for (int64_t i = 0; i < rows; ++i) {
    uint8_t* row = out + i * (codes + scales);
    if (format == 0) encode_row<MainRow>(x + i * width, row, row + codes, width);
    if (format == 1) encode_row<WindowRow>(x + i * width, row, row + codes, width);
    if (format == 2) encode_row<IndexRow>(x + i * width, row, row + codes, width);
  }
}
}
