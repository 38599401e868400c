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
  // Rows of a work item. With many tokens and long rows, what is fetched for one row should serve many.
  static int64_t panel_rows(int64_t tokens, int64_t k) {
    if (k < 1024) return 32;
    return SplitLayout(tokens, k).groups > 3 ? 256 : 64;
  }

  static int64_t packed_bytes(int64_t tokens, int64_t k) { return SplitLayout(tokens, k).bytes(); }
  static int64_t cycles(int64_t rows, int64_t tokens, int64_t k) {
    return (rows + 15) / 16 * ((k + 31) / 32) * (40 + 16 * SplitLayout(tokens, k).groups);
  }

  static void pack(const float* x, int64_t ldx, const int32_t* rows, int64_t tokens, int64_t k, Format format,
                   char* out) {
    split_columns(x, ldx, rows, SplitLayout(tokens, k), 0, tokens, 0, k, format, out);
  }
  static void pack_columns(const float* values, int64_t ld, int64_t tokens, int64_t k, int64_t column, int64_t n,
                           Format format, char* out) {
    split_columns(values, ld, nullptr, SplitLayout(tokens, k), 0, tokens, column, n, format, out);
  }

  // x [tokens, groups, k] as `groups` packed inputs, one behind the other
  static void pack_groups(const float* x, int64_t groups, int64_t tokens, int64_t k, Format format, char* out) {
    const SplitLayout layout(tokens, k);
    constexpr int64_t kColumns = 512, kTokens = 64;
    const int64_t parts = (k + kColumns - 1) / kColumns, chunks = (tokens + kTokens - 1) / kTokens;
    for_ranges(groups * chunks * parts, std::min(tokens, kTokens) * std::min(k, kColumns) / 2,
               [&](int64_t begin, int64_t end) {
                 for (int64_t item = begin; item < end; ++item) {
                   const int64_t g = item / parts / chunks, first = item / parts % chunks * kTokens;
                   const int64_t column = item % parts * kColumns;
                   split_columns(x + g * k + column, groups * k, nullptr, layout, first,
                                 std::min(first + kTokens, tokens), column, std::min(kColumns, k - column), format,
                                 out + g * layout.bytes());
                 }
               });
  }

  // out[t * ldo + r] = w[row0 + r] . x[t] for as many rows as one likes
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
    if (x.groups > 3) return many<Decoder>(w, row0, rows, packed, x, out, ldo);
    bool plain = true;
    for (int64_t r = 0; r < rows; r += 32) {
      const int64_t n = std::min<int64_t>(32, rows - r);
      plain &= n > 16 ? few<Decoder, 2>(w, row0 + r, n, packed, x, out + r, ldo)
                      : few<Decoder, 1>(w, row0 + r, n, packed, x, out + r, ldo);
    }
    return plain;
  }

  template <typename Decoder, int N>
  static bool few(const Matrix& w, int64_t row0, int64_t rows, const char* packed, const SplitLayout& x, float* out,
                  int64_t ldo) {
    if (x.groups == 1) return stream<Decoder, 1, N>(w, row0, rows, packed, x, out, ldo);
    if (x.groups == 2) return stream<Decoder, 2, N>(w, row0, rows, packed, x, out, ldo);
    return stream<Decoder, 3, N>(w, row0, rows, packed, x, out, ldo);
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
    join_sums<N>(sums, N * 256, x.tokens, rows, out, ldo);
    return first.plain() && (N == 1 || second.plain());
  }

  // Many tokens: two tiles of 16 blocks, 32 KiB, are decoded into L1 and meet all tokens of a chunk. Where rows are
  // long, the sums of all rows and tokens at hand wait in L2 for the next stretch of k, so that the activations of a
  // stretch are fetched once for many rows.
  template <typename Decoder>
  static bool many(const Matrix& w, int64_t row0, int64_t rows, const char* packed, const SplitLayout& x, float* out,
                   int64_t ldo) {
    static thread_local Scratch scratch;
    const bool short_rows = x.blocks <= kStretch;  // sums are final at once
    const int64_t chunk = short_rows ? x.tokens : 128;
    const int64_t chunk_groups = std::min(x.groups, (chunk + 15) / 16 * 3), pairs = (rows + 31) / 32;
    char* tiles = scratch.get<char>(2 * kStretch * kTileBytes +
                                    (short_rows ? kJoinGroups : pairs * chunk_groups) * kGroupFloats * 4);
    float* sums = reinterpret_cast<float*>(tiles + 2 * kStretch * kTileBytes);
    bool plain = true;
    for (int64_t t = 0; t < x.tokens; t += chunk) {
      const int64_t t1 = std::min(t + chunk, x.tokens);
      for (int64_t k = 0; k < x.blocks; k += kStretch) {
        for (int64_t r = 0; r < rows; r += 32) {
          float* here = sums + (short_rows ? 0 : r / 32 * chunk_groups * kGroupFloats);
          const int64_t n = std::min<int64_t>(32, rows - r);
          plain &= n > 16 ? pair<Decoder, 2>(w, row0 + r, n, k, packed, x, t, t1, tiles, here, out + r, ldo)
                          : pair<Decoder, 1>(w, row0 + r, n, k, packed, x, t, t1, tiles, here, out + r, ldo);
        }
      }
    }
    return plain;
  }

  // One or two weight tiles, one stretch of k from block k on, tokens t0 to t1
  template <typename Decoder, int N>
  static bool pair(const Matrix& w, int64_t row0, int64_t rows, int64_t k, const char* packed, const SplitLayout& x,
                   int64_t t0, int64_t t1, char* tiles, float* sums, float* out, int64_t ldo) {
    const bool short_rows = x.blocks <= kStretch;
    const int64_t end = std::min(k + kStretch, x.blocks);
    const auto tile = [&](int i, int64_t b) { return tiles + (i * kStretch + b % kStretch) * kTileBytes; };
    Decoder first(w, row0, static_cast<int>(std::min<int64_t>(16, rows)));
    for (int64_t b = k; b < end; b += kStep) first.step(b, end, [&](int64_t i) { return tile(0, i); }, [](int64_t) {});
    bool plain = first.plain();
    if constexpr (N > 1) {
      Decoder second(w, row0 + 16, static_cast<int>(rows - 16));
      for (int64_t b = k; b < end; b += kStep)
        second.step(b, end, [&](int64_t i) { return tile(1, i); }, [](int64_t) {});
      plain &= second.plain();
    }
    const char* a = packed + k * x.tile_bytes;
    for (int64_t t = t0; t < t1; t += kJoinTokens) {
      const int64_t last = std::min(t + kJoinTokens, t1);
      const int64_t g0 = t / 16 * 3, g1 = std::min(g0 + kJoinGroups, x.groups);
      float* here = sums + (short_rows ? 0 : (g0 - t0 / 16 * 3) * kGroupFloats);
      int64_t g = g0;
      for (; g + 2 <= g1; g += 2)
        step<2, N>(a + g * x.group_bytes, x, tiles, end - k, here + (g - g0) * kGroupFloats, k == 0);
      if (g < g1) step<1, N>(a + g * x.group_bytes, x, tiles, end - k, here + (g - g0) * kGroupFloats, k == 0);
      if (end < x.blocks) continue;
      for (int64_t i = t; i < last; i += 16)
        join_sums<N>(here + (i - t) / 16 * 3 * kGroupFloats, kGroupFloats, std::min<int64_t>(16, last - i), rows,
                     out + i * ldo, ldo);
    }
    return plain;
  }

  template <int G, int N>
  static void step(const char* a, const SplitLayout& x, const char* tiles, int64_t blocks, float* sums, bool first) {
    if (first)
      TileBlock<G, N>::zero();
    else
      TileBlock<G, N>::load(sums);
    TileBlock<G, N>::accumulate(a, x.tile_bytes, x.group_bytes, tiles, kStretch * kTileBytes, blocks);
    TileBlock<G, N>::store(sums);
  }

  static constexpr int64_t kStretch = 16;                      // blocks of k
  static constexpr int64_t kGroupFloats = 512;                 // sums of a group: two tiles
  static constexpr int64_t kJoinTokens = 32, kJoinGroups = 6;  // tokens whose sums are added up together

  // hi + (mid + lo) of a block of up to 16 tokens, to `rows` outputs in N tiles. Sums of groups lie `group` apart.
  template <int N>
  static void join_sums(const float* sums, int64_t group, int64_t tokens, int64_t rows, float* out, int64_t ldo) {
    __mmask16 mask[N];
    for (int i = 0; i < N; ++i) mask[i] = static_cast<__mmask16>((1u << std::min<int64_t>(16, rows - 16 * i)) - 1);
    const auto row = [&](int64_t r) { return sums + r / 16 * group + r % 16 * 16; };
    for (int64_t t = 0; t < tokens; ++t, out += ldo) {
      const float *hi = row(t), *mid = row(t + tokens), *lo = row(t + 2 * tokens);
      for (int i = 0; i < N; ++i) {
        const __m512 rest = _mm512_add_ps(_mm512_loadu_ps(mid + i * 256), _mm512_loadu_ps(lo + i * 256));
        _mm512_mask_storeu_ps(out + 16 * i, mask[i], _mm512_add_ps(_mm512_loadu_ps(hi + i * 256), rest));
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
