// Products of packed weights and float32 activations on the tile unit (AMX-BF16), with float32 accuracy.
//
// Weights of every packed format are exact in bfloat16 and activations are exact sums of three bfloat16 numbers, so
// only the float32 sums round. An output's chain over k is the same for every number of tokens and every place.
#pragma once

#include <algorithm>

#include "amx_decode.hpp"
#include "amx_split.hpp"
#include "amx_tiles.hpp"
#include "fma_product.hpp"
#include "ranges.hpp"
#include "scratch.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

class AmxProduct {
 public:
  static constexpr int64_t kPanel = kPanelRows;  // rows of a work item: two weight tiles

  static int64_t packed_bytes(int64_t tokens, int64_t k) { return SplitLayout(tokens, k).bytes(); }
  static int64_t cycles(int64_t rows, int64_t tokens, int64_t k) {
    return (rows + 15) / 16 * ((k + 31) / 32) * (40 + 16 * SplitLayout(tokens, k).groups);
  }

  static void pack(const float* x, int64_t ldx, const int32_t* rows, int64_t tokens, int64_t k, Format format,
                   char* out) {
    split_columns(x, ldx, rows, SplitLayout(tokens, k), 0, k, format, out);
  }
  static void pack_columns(const float* values, int64_t ld, int64_t tokens, int64_t k, int64_t column, int64_t n,
                           Format format, char* out) {
    split_columns(values, ld, nullptr, SplitLayout(tokens, k), column, n, format, out);
  }

  // x [tokens, groups, k] as `groups` packed inputs, one behind the other
  static void pack_groups(const float* x, int64_t groups, int64_t tokens, int64_t k, Format format, char* out) {
    const SplitLayout layout(tokens, k);
    constexpr int64_t kColumns = 512;
    const int64_t parts = (k + kColumns - 1) / kColumns;
    for_ranges(groups * parts, tokens * std::min(k, kColumns) / 2, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t g = item / parts, column = item % parts * kColumns;
        split_columns(x + g * k + column, groups * k, nullptr, layout, column, std::min(kColumns, k - column), format,
                      out + g * layout.bytes());
      }
    });
  }

  // out[t * ldo + r] = w[row0 + r] . x[t] for up to kPanel rows
  void run(const Matrix& w, int64_t row0, int64_t rows, const char* packed, int64_t tokens, float* out, int64_t ldo) {
    if (tokens == 0) return;
    const SplitLayout x(tokens, w.k);
    session_.configure(x.rows);
    bool plain;
    if (w.format == Format::mxfp4)
      plain = choose<Mxfp4Decoder>(w, row0, rows, packed, x, out, ldo);
    else if (w.format == Format::fp8)
      plain = choose<Fp8Decoder>(w, row0, rows, packed, x, out, ldo);
    else
      plain = choose<Bf16Decoder>(w, row0, rows, packed, x, out, ldo);
    if (!plain) through_float(w, row0, rows, packed, x, out, ldo);
  }

 private:
  template <typename Decoder>
  static bool choose(const Matrix& w, int64_t row0, int64_t rows, const char* packed, const SplitLayout& x, float* out,
                     int64_t ldo) {
    if (rows <= 16) {
      if (x.groups == 1) return stream<Decoder, 1, 1>(w, row0, rows, packed, x, out, ldo);
      if (x.groups == 2) return stream<Decoder, 2, 1>(w, row0, rows, packed, x, out, ldo);
      if (x.groups == 3) return stream<Decoder, 3, 1>(w, row0, rows, packed, x, out, ldo);
      return panel<Decoder, 1>(w, row0, rows, packed, x, out, ldo);
    }
    if (x.groups == 1) return stream<Decoder, 1, 2>(w, row0, rows, packed, x, out, ldo);
    if (x.groups == 2) return stream<Decoder, 2, 2>(w, row0, rows, packed, x, out, ldo);
    if (x.groups == 3) return stream<Decoder, 3, 2>(w, row0, rows, packed, x, out, ldo);
    return panel<Decoder, 2>(w, row0, rows, packed, x, out, ldo);
  }

  // Few tokens: sums stay in registers over the whole of k, and the tile products of one step run while the next
  // step is decoded.
  template <typename Decoder, int G, int N>
  static bool stream(const Matrix& w, int64_t row0, int64_t rows, const char* packed, const SplitLayout& x, float* out,
                     int64_t ldo) {
    constexpr int64_t kRing = 2 * kStep;
    alignas(64) char rings[N * kRing * kTileBytes];
    alignas(64) float sums[G * N * 256];
    const auto tile = [&](int i, int64_t b) { return rings + (i * kRing + b % kRing) * kTileBytes; };
    const auto product = [&]<int I>(int64_t b) {
      TileStream<G, N>::template accumulate<I>(packed + b * x.tile_bytes, x.group_bytes, tile(I, b));
    };
    Decoder first(w, row0, static_cast<int>(std::min<int64_t>(16, rows)));
    Decoder second(w, row0 + 16, static_cast<int>(rows - 16));  // used if N is 2
    TileStream<G, N>::zero();
    const int64_t end = x.blocks;
    for (int64_t b = 0; b < end; b += kStep) {
      const bool behind = b > 0;
      first.step(
          b, end, [&](int64_t i) { return tile(0, i); },
          [&](int64_t i) {
            if (behind) product.template operator()<0>(i - kStep);
          });
      if constexpr (N > 1) {
        second.step(
            b, end, [&](int64_t i) { return tile(1, i); },
            [&](int64_t i) {
              if (behind) product.template operator()<1>(i - kStep);
            });
      }
    }
    // What the last steps have left over: a short last step has served only part of the one before
    const int64_t done = std::max<int64_t>(0, end - kStep);
    for (int64_t b = done; b < end; ++b) product.template operator()<0>(b);
    if constexpr (N > 1) {
      for (int64_t b = done; b < end; ++b) product.template operator()<1>(b);
    }
    TileStream<G, N>::store(sums);
    join_sums<N>(sums, N * 256, x, rows, out, ldo);
    return first.plain() && (N == 1 || second.plain());
  }

  // Many tokens: a panel of 16 blocks is decoded once and meets all tokens. Two tiles of them fill 32 KiB of L1.
  template <typename Decoder, int N>
  static bool panel(const Matrix& w, int64_t row0, int64_t rows, const char* packed, const SplitLayout& x, float* out,
                    int64_t ldo) {
    static thread_local Scratch scratch;
    char* tiles = scratch.get<char>(2 * kPanelBlocks * kTileBytes + x.groups * kGroupFloats * 4);
    float* sums = reinterpret_cast<float*>(tiles + 2 * kPanelBlocks * kTileBytes);
    const auto tile = [&](int i, int64_t b) { return tiles + (i * kPanelBlocks + b % kPanelBlocks) * kTileBytes; };
    Decoder first(w, row0, static_cast<int>(std::min<int64_t>(16, rows)));
    Decoder second(w, row0 + 16, static_cast<int>(rows - 16));  // used if N is 2
    for (int64_t k = 0; k < x.blocks; k += kPanelBlocks) {
      const int64_t end = std::min(k + kPanelBlocks, x.blocks);
      for (int64_t b = k; b < end; b += kStep)
        first.step(b, end, [&](int64_t i) { return tile(0, i); }, [](int64_t) {});
      if constexpr (N > 1) {
        for (int64_t b = k; b < end; b += kStep)
          second.step(b, end, [&](int64_t i) { return tile(1, i); }, [](int64_t) {});
      }
      const char* a = packed + k * x.tile_bytes;
      int64_t g = 0;
      for (; g + 2 <= x.groups; g += 2)
        step<2, N>(a + g * x.group_bytes, x, tiles, end - k, sums + g * kGroupFloats, k == 0);
      if (g < x.groups) step<1, N>(a + g * x.group_bytes, x, tiles, end - k, sums + g * kGroupFloats, k == 0);
    }
    join_sums<N>(sums, kGroupFloats, x, rows, out, ldo);
    return first.plain() && (N == 1 || second.plain());
  }

  template <int G, int N>
  static void step(const char* a, const SplitLayout& x, const char* tiles, int64_t blocks, float* sums, bool first) {
    if (first)
      TileBlock<G, N>::zero();
    else
      TileBlock<G, N>::load(sums);
    TileBlock<G, N>::accumulate(a, x.tile_bytes, x.group_bytes, tiles, kPanelBlocks * kTileBytes, blocks);
    TileBlock<G, N>::store(sums);
  }

  static constexpr int64_t kPanelBlocks = 16;
  static constexpr int64_t kGroupFloats = 512;  // sums of a group in a panel: two tiles

  // hi + (mid + lo) of every token, to `rows` outputs in N tiles
  template <int N>
  static void join_sums(const float* sums, int64_t group, const SplitLayout& x, int64_t rows, float* out, int64_t ldo) {
    for (int64_t t = 0; t < x.tokens; ++t) {
      const float* part[3];
      for (int p = 0; p < 3; ++p) {
        const int64_t r = x.row(t, p);
        part[p] = sums + r / 16 * group + r % 16 * 16;
      }
      for (int i = 0; i < N; ++i) {
        const auto load = [&](int p) { return _mm512_loadu_ps(part[p] + i * 256); };
        const __m512 y = _mm512_add_ps(load(0), _mm512_add_ps(load(1), load(2)));
        const int64_t n = std::min<int64_t>(16, rows - 16 * i);
        _mm512_mask_storeu_ps(out + t * ldo + 16 * i, static_cast<__mmask16>((1u << n) - 1), y);
      }
    }
  }

  // Rows with scales at the ends of their range, or with NaN: the plain float32 product, for every batch alike.
  static void through_float(const Matrix& w, int64_t row0, int64_t rows, const char* packed, const SplitLayout& x,
                            float* out, int64_t ldo) {
    static thread_local Scratch scratch;
    float* rebuilt = scratch.get<float>(x.tokens * w.k * static_cast<int64_t>(sizeof(float)));
    for (int64_t t = 0; t < x.tokens; ++t) join_token(packed, x, t, w.k, w.format, rebuilt + t * w.k);
    FmaProduct::run_rows(w, row0, rows, rebuilt, w.k, x.tokens, out, ldo);
  }

  TileSession session_;
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
