// Packed weights to tiles of bfloat16: 16 columns are outputs, each tile row a pair of k for all of them.
//
// Both steps are exact. Rows of the matrix are loaded as they lie, transposed as 16 x 16 double words, and each
// double word is then taken apart by shifts, which yields pairs of k in the order of ColumnOrder.
//
// A value v 2^e has the bit pattern bits(v) + (e << 7), except that zero stays zero. With
// top = bits(largest v), it is (top + (e << 7)) - (top - bits(v)), and an unsigned saturating subtraction gives
// zero for the table entry 0xFFFF. That holds while all results are normal numbers; other scales, and NaN, are
// reported, and the caller takes the rows through float32.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "amx_tiles.hpp"
#include "matrix.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

// v[i] double word j <-> v[j] double word i
[[gnu::always_inline]] inline void transpose_16x16(__m512i* v) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xDD);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xDD);
    v[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xDD);
  }
}

// 64 bytes (or the `bytes` that are left) of `rows` rows; missing ones are zero
[[gnu::always_inline]] inline void load_rows(const uint8_t* p, int64_t stride, int rows, int64_t bytes, __m512i* v) {
  if (rows == 16 && bytes >= 64) {
    for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_si512(p + i * stride);
    return;
  }
  const __mmask64 mask = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
  for (int i = 0; i < 16; ++i) v[i] = i < rows ? _mm512_maskz_loadu_epi8(mask, p + i * stride) : _mm512_setzero_si512();
}

inline constexpr int64_t kPanelRows = 32;  // what a work item covers

// The next panel lies behind this one; fetching it now, in memory order and a few lines at a time, keeps the
// memory bus busy while this tile is decoded. Addresses past the end are ignored by the CPU.
template <int Lines>
inline void fetch_ahead(const uint8_t* p) {
  for (int i = 0; i < Lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(p + i * 64), _MM_HINT_T2);
}

// A decoder belongs to 16 rows of a matrix. step(block, end, tiles, each) decodes up to kStep blocks from `block` on;
// block b goes to tiles(b), and each(b) follows at once. plain() tells whether all of it was exact.
inline constexpr int64_t kStep = 4;

struct Mxfp4Tables {
  alignas(64) uint16_t distance[32];  // top - bits(v); twice, since the index has 5 bits
};

inline constexpr uint16_t kE2M1Top = 0x40C0;  // bits of 6

inline constexpr Mxfp4Tables make_mxfp4_tables() {
  constexpr uint16_t bits[8] = {0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0};
  Mxfp4Tables t{};
  for (int i = 0; i < 32; ++i) {
    const int code = i & 15;
    const int sign = code & 8 ? 0 : 0x8000;
    t.distance[i] = static_cast<uint16_t>(code & 7 ? sign + kE2M1Top - bits[code & 7] : 0xFFFF);
  }
  return t;
}

// Scale bytes of 16 rows for up to 16 blocks, transposed: byte r of out[b] belongs to row r.
inline void load_scales(const uint8_t* p, int64_t stride, int rows, int64_t blocks, __m128i* out) {
  const __mmask16 mask = blocks >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << blocks) - 1);
  const __m128i one = _mm_set1_epi8(127);
  __m128i v[16], w[16];
  for (int i = 0; i < 16; ++i) v[i] = i < rows ? _mm_mask_loadu_epi8(one, mask, p + i * stride) : one;
  for (int step = 0; step < 4; ++step) {  // four rounds of interleaving rows i and i + 8 transpose 16 x 16 bytes
    for (int i = 0; i < 8; ++i) {
      w[2 * i] = _mm_unpacklo_epi8(v[i], v[i + 8]);
      w[2 * i + 1] = _mm_unpackhi_epi8(v[i], v[i + 8]);
    }
    std::copy_n(w, 16, v);
  }
  std::copy_n(v, 16, out);
}

// Exact for scales in [2, 252].
class Mxfp4Decoder {
 public:
  Mxfp4Decoder(const Matrix& w, int64_t row, int rows)
      : rows_(rows),
        stride_(w.k / 2),
        scale_stride_(w.k / 32),
        codes_(static_cast<const uint8_t*>(w.data) + row * stride_),
        scales_(w.scale + row * scale_stride_) {}

  template <typename Tiles, typename Each>
  [[gnu::always_inline]] void step(int64_t block, int64_t end, Tiles&& tiles, Each&& each) {
    static constexpr Mxfp4Tables tables = make_mxfp4_tables();
    const __m512i distance = _mm512_load_si512(tables.distance);
    const __m512i high_byte = _mm512_set4_epi32(0x0F0F0D0D, 0x0B0B0909, 0x07070505, 0x03030101);
    const __m512i top = _mm512_set1_epi16(static_cast<short>(0x8000 + kE2M1Top - (127 << 7)));
    if (block >= loaded_) {
      load_scales(scales_ + block, scale_stride_, rows_, end - block, scale_);
      first_ = block;
      loaded_ = block + 16;
    }
    __m512i v[16];
    fetch_ahead<1>(scales_ + kPanelRows * scale_stride_ + block * 16);
    load_rows(codes_ + block * 16, stride_, rows_, (end - block) * 16, v);
    transpose_16x16(v);
#pragma GCC unroll 4  // keeps v in registers
    for (int i = 0; i < 4; ++i) {
      const int64_t b = block + i;
      if (b >= end) break;
      const __m128i bytes = scale_[b - first_];
      low_ = _mm_min_epu8(low_, bytes);
      high_ = _mm_max_epu8(high_, bytes);
      const __m512i s = _mm512_cvtepu8_epi32(bytes);
      const __m512i reach = _mm512_add_epi16(_mm512_slli_epi16(_mm512_or_si512(s, _mm512_slli_epi32(s, 16)), 7), top);
      char* tile = tiles(b);
      fetch_ahead<4>(codes_ + kPanelRows * stride_ + b * 256);
      for (int j = 0; j < 4; ++j) {
        const __m512i d = v[i * 4 + j];
        const auto put = [&](int n, __m512i index) {
          const __m512i r = _mm512_subs_epu16(reach, _mm512_permutexvar_epi16(index, distance));
          _mm512_store_si512(tile + (j * 4 + n) * 64, r);
        };
        const __m512i next = _mm512_srli_epi16(d, 4);
        put(0, d);
        put(1, next);
        put(2, _mm512_shuffle_epi8(d, high_byte));  // where a shift would wait for the port of the subtraction
        put(3, _mm512_shuffle_epi8(next, high_byte));
      }
      each(b);
    }
  }

  bool plain() const {
    const __m128i below = _mm_subs_epu8(_mm_set1_epi8(2), low_);
    const __m128i above = _mm_subs_epu8(high_, _mm_set1_epi8(static_cast<char>(252)));
    const __m128i out = _mm_or_si128(below, above);
    return _mm_testz_si128(out, out);
  }

 private:
  int rows_;
  int64_t stride_, scale_stride_;
  const uint8_t *codes_, *scales_;
  int64_t first_ = 0, loaded_ = 0;  // blocks whose scales are in scale_
  __m128i scale_[16];
  __m128i low_ = _mm_set1_epi8(127), high_ = _mm_set1_epi8(127);
};

struct Fp8Tables {
  alignas(64) uint16_t distance[32];  // of the subnormal magnitudes 0..7
};

inline constexpr uint16_t kE4M3Top = 0x43E0;  // bits of 448

inline constexpr Fp8Tables make_fp8_tables() {
  constexpr uint16_t bits[8] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00 - 0, 0x3C20, 0x3C40, 0x3C60};
  Fp8Tables t{};
  for (int i = 0; i < 32; ++i) t.distance[i] = static_cast<uint16_t>(i & 7 ? kE4M3Top - bits[i & 7] : 0xFFFF);
  return t;
}

// Exact for scales in [10, 246] and weights that are not NaN.
//
// A normal magnitude m has the bits (m << 4) + origin. Subnormal ones, zero among them, are rare in weights that use
// their range: the two tiles of a load take the longer way only if one is there.
class Fp8Decoder {
 public:
  Fp8Decoder(const Matrix& w, int64_t row, int rows)
      : rows_(rows),
        k_(w.k),
        codes_(static_cast<const uint8_t*>(w.data) + row * w.k),
        // 16 rows meet at most two rows of scale blocks
        scale0_(w.scale + row / 32 * ((w.k + 31) / 32)),
        scale1_(w.scale + (row + rows - 1) / 32 * ((w.k + 31) / 32)),
        second_(static_cast<__mmask16>(0xFFFFu << std::min<int64_t>(16, 32 - row % 32))) {}

  template <typename Tiles, typename Each>
  [[gnu::always_inline]] void step(int64_t block, int64_t end, Tiles&& tiles, Each&& each) {
    for (int64_t b = block; b < std::min(block + kStep, end); b += 2) {
      __m512i v[16];
      load_rows(codes_ + b * 32, k_, rows_, k_ - b * 32, v);
      const __m512i magnitude = _mm512_set1_epi8(0x7F), least = _mm512_set1_epi8(8);
      __m512i above = _mm512_setzero_si512();  // m - 8: NaN is 0x77, subnormal numbers wrap to 0xF8 and more
      for (int i = 0; i < 16; ++i)
        above = _mm512_max_epu8(above, _mm512_sub_epi8(_mm512_and_si512(v[i], magnitude), least));
      transpose_16x16(v);
      if (_mm512_cmpge_epu8_mask(above, _mm512_set1_epi8(0x77)) == 0) [[likely]]
        pair<false>(b, end, v, tiles, each);
      else
        pair<true>(b, end, v, tiles, each);
    }
  }

  bool plain() const { return plain_ && _mm512_cmpeq_epi8_mask(largest_, _mm512_set1_epi8(0x7F)) == 0; }

 private:
  template <bool Special, typename Tiles, typename Each>
  [[gnu::always_inline]] void pair(int64_t block, int64_t end, const __m512i* v, Tiles&& tiles, Each&& each) {
    static constexpr Fp8Tables tables = make_fp8_tables();
    const __m512i distance = _mm512_load_si512(tables.distance);
    const __m512i magnitude_bits = _mm512_set1_epi16(0x7F0), subnormal = _mm512_set1_epi16(0x80);
    const __m512i sign_bit = _mm512_set1_epi16(static_cast<short>(0x8000));
    const __m512i both = _mm512_or_si512(sign_bit, magnitude_bits);
    if constexpr (Special) {
      for (int i = 0; i < 16; ++i) largest_ = _mm512_max_epu8(largest_, _mm512_and_si512(v[i], _mm512_set1_epi8(0x7F)));
    }
#pragma GCC unroll 2  // keeps v in registers
    for (int i = 0; i < 2; ++i) {
      const int64_t b = block + i;
      if (b >= end) break;
      const int s0 = scale0_[b], s1 = scale1_[b];
      plain_ &= s0 >= 10 && s0 <= 246 && s1 >= 10 && s1 <= 246;
      const auto lanes = [&](int base) {
        return _mm512_mask_mov_epi32(_mm512_set1_epi16(static_cast<short>(base + (s0 - 127) * 128)), second_,
                                     _mm512_set1_epi16(static_cast<short>(base + (s1 - 127) * 128)));
      };
      const __m512i origin = lanes(120 << 7);
      char* tile = tiles(b);
      fetch_ahead<8>(codes_ + kPanelRows * k_ + b * 512);
      for (int j = 0; j < 8; ++j) {
        const __m512i d = v[i * 8 + j];
        if constexpr (!Special) {
          const auto put = [&](int n, __m512i high) {  // sign and magnitude in the high byte
            const __m512i r = _mm512_and_si512(_mm512_srai_epi16(high, 4), both);
            _mm512_store_si512(tile + (j * 2 + n) * 64, _mm512_add_epi16(r, origin));
          };
          put(0, _mm512_slli_epi16(d, 8));
          put(1, d);
        } else {
          const __m512i reach = lanes(kE4M3Top);
          const auto put = [&](int n, __m512i shifted, __m512i index, __m512i signs) {
            const __m512i m = _mm512_and_si512(shifted, magnitude_bits);
            __m512i r = _mm512_add_epi16(m, origin);
            r = _mm512_mask_subs_epu16(r, _mm512_cmplt_epu16_mask(m, subnormal), reach,
                                       _mm512_permutexvar_epi16(index, distance));
            r = _mm512_ternarylogic_epi32(r, signs, sign_bit, 0xF8);  // r | (signs & sign_bit)
            _mm512_store_si512(tile + (j * 2 + n) * 64, r);
          };
          put(0, _mm512_slli_epi16(d, 4), d, _mm512_slli_epi16(d, 8));
          put(1, _mm512_srli_epi16(d, 4), _mm512_srli_epi16(d, 8), d);
        }
      }
      each(b);
    }
  }

  int rows_;
  int64_t k_;
  const uint8_t *codes_, *scale0_, *scale1_;
  __mmask16 second_;
  bool plain_ = true;
  __m512i largest_ = _mm512_setzero_si512();
};

// bfloat16 only has to be transposed. Subnormal weights count as zero in the tile unit.
class Bf16Decoder {
 public:
  Bf16Decoder(const Matrix& w, int64_t row, int rows)
      : rows_(rows), stride_(w.k * 2), data_(static_cast<const uint8_t*>(w.data) + row * stride_) {}

  template <typename Tiles, typename Each>
  [[gnu::always_inline]] void step(int64_t block, int64_t end, Tiles&& tiles, Each&& each) {
    for (int64_t b = block; b < std::min(block + kStep, end); ++b) {
      __m512i v[16];
      fetch_ahead<16>(data_ + kPanelRows * stride_ + b * 1024);
      load_rows(data_ + b * 64, stride_, rows_, stride_ - b * 64, v);
      transpose_16x16(v);
      char* tile = tiles(b);
      for (int j = 0; j < 16; ++j) _mm512_store_si512(tile + j * 64, v[j]);
      each(b);
    }
  }

  bool plain() const { return true; }

 private:
  int rows_;
  int64_t stride_;
  const uint8_t* data_;
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
