// Hyper-connections: one pass over the streams does the update, the coefficient product and the mixing.
//
// Every sum over channels is made of segments of kSegment channels, added in ascending order; inside a segment a
// lane adds tile after tile, stream after stream, vector after vector. Token blocking and threads only regroup these
// chains, so a token has the same bits alone, in any batch, and from the three separate ops.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "kernel_core/parallel.hpp"
#include "reduce.hpp"
#include "sinkhorn.hpp"

namespace mhc_engram {
namespace KERNEL_CORE_ISA {
namespace {

constexpr int W = F32::width;
constexpr int64_t kSegment = 512;                 // channels of a partial sum, the unit of work beside tokens
constexpr int64_t kTile = 128;                    // channels whose updated streams stay in the first cache
constexpr int64_t kTokens = 64;                   // tokens that share a segment of fn in the second cache, at most
constexpr int kAccumulators = W == 16 ? 24 : 12;  // registers for dot products
constexpr int kMostTokens = kAccumulators / 3;    // that share a load of fn
constexpr int kMostRows = 12;                     // more streams of fn at a time outrun the prefetchers
constexpr int kSums = kCoefficients + 2;          // dots, squares of X, squares of the mix

// Sum of squares and mix of one token while its channels stream by.
struct Running {
  F32 squares[kStreams], mix;
};

enum Part { kUpdate = 1, kCoefficient = 2, kMix = 4 };

// Channels [c, c + width) of token t: update, squares, mix; the updated streams also go to `tile`.
template <int Parts>
void stream_tile(const HcStep& a, int64_t t, int64_t c, int64_t width, float* tile, Running& running) {
  const int64_t d = a.channels;
  float* x = a.streams + t * kStreams * d + c;
  const float* y = a.y + t * d + c;
  const float* post = a.post + t * kStreams;
  const float* comb = a.comb + t * kStreams * kStreams;
  const float* pre = a.pre_mix + t * kStreams;
  float* mixed = a.mixed + t * d + c;
  Running run = running;
  for (int64_t i = 0; i < width; i += W) {
    F32 v[kStreams];
    for (int j = 0; j < kStreams; ++j) v[j] = F32::load(x + j * d + i);
    if constexpr (Parts & kUpdate) {
      const F32 out = F32::load(y + i);
      F32 u[kStreams];
      for (int j = 0; j < kStreams; ++j) u[j] = F32::set(post[j]) * out;
      for (int k = 0; k < kStreams; ++k)
        for (int j = 0; j < kStreams; ++j) u[j] = fma(F32::set(comb[k * kStreams + j]), v[k], u[j]);
      for (int j = 0; j < kStreams; ++j) {
        v[j] = u[j];
        v[j].store(x + j * d + i);
      }
    }
    if constexpr (Parts & kCoefficient) {
      for (int j = 0; j < kStreams; ++j) {
        v[j].store(tile + j * kTile + i);
        run.squares[j] = fma(v[j], v[j], run.squares[j]);
      }
    }
    if constexpr (Parts & kMix) {
      F32 m = F32::set(pre[0]) * v[0];
      for (int j = 1; j < kStreams; ++j) m = fma(F32::set(pre[j]), v[j], m);
      m.store(mixed + i);
      run.mix = fma(m, m, run.mix);
    }
  }
  running = run;
}

using StreamTile = void (*)(const HcStep&, int64_t, int64_t, int64_t, float*, Running&);

StreamTile stream_tile_of(const HcStep& a) {
  static constexpr StreamTile table[] = {stream_tile<0>, stream_tile<1>, stream_tile<2>, stream_tile<3>,
                                         stream_tile<4>, stream_tile<5>, stream_tile<6>, stream_tile<7>};
  return table[(a.y ? kUpdate : 0) | (a.fn ? kCoefficient : 0) | (a.mixed ? kMix : 0)];
}

// Keeps the compiler from reading a value again from memory at each use: loads are the scarce slots here.
inline void keep_in_register(F32& x) {
#if defined(KERNEL_CORE_ISA_avx512) && defined(__GNUC__)
  asm("" : "+v"(x.v));
#endif
}

// NR rows of fn against NT tokens' tiles; `lanes` [row][token] carries the sums from tile to tile. Half a kilobyte of
// each row is too short for the processor to foresee the next rows, so those at `next` are fetched by hand; for a
// single token the loads are close enough together without.
template <int NT, int NR>
inline void dot_tile(const float* fn, const float* next, int64_t d, const float* tiles, int64_t width, float* lanes) {
  F32 acc[NR][NT];
  for (int r = 0; r < NR; ++r)
    for (int t = 0; t < NT; ++t) acc[r][t] = F32::load(lanes + (r * NT + t) * W);
  for (int j = 0; j < kStreams; ++j) {
    for (int64_t i = 0; i < width; i += W) {
      F32 x[NT];
      for (int t = 0; t < NT; ++t) {
        x[t] = F32::load(tiles + (t * kStreams + j) * kTile + i);
        keep_in_register(x[t]);
      }
      for (int r = 0; r < NR; ++r) {
        const F32 w = F32::load(fn + (r * kStreams + j) * d + i);
        if (NT > 1 && W > 1) __builtin_prefetch(next + (r * kStreams + j) * d + i);
        for (int t = 0; t < NT; ++t) acc[r][t] = fma(w, x[t], acc[r][t]);
      }
    }
  }
  for (int r = 0; r < NR; ++r)
    for (int t = 0; t < NT; ++t) acc[r][t].store(lanes + (r * NT + t) * W);
}

// Up to NT tokens from t0 over one segment; a place without a token multiplies zeros.
template <int NT>
void segment_sums(const HcStep& a, int64_t t0, int64_t count, int64_t segment, int64_t segments, float* sums) {
  constexpr int NR = std::min(kAccumulators / NT, kMostRows);
  alignas(64) float tiles[NT * kStreams * kTile];
  alignas(64) float lanes[kCoefficients * NT * W] = {};
  if (count < NT) std::fill(tiles + count * kStreams * kTile, tiles + NT * kStreams * kTile, 0.0f);
  Running run[NT];
  for (auto& r : run) r = {{F32::zero(), F32::zero(), F32::zero(), F32::zero()}, F32::zero()};

  const StreamTile stream = stream_tile_of(a);
  const int64_t end = std::min(a.channels, (segment + 1) * kSegment);
  for (int64_t c = segment * kSegment; c < end; c += kTile) {
    const int64_t width = std::min(kTile, end - c);
    for (int64_t t = 0; t < count; ++t) stream(a, t0 + t, c, width, tiles + t * kStreams * kTile, run[t]);
    if (!a.fn) continue;
    for (int r = 0; r < kCoefficients; r += NR) {
      const float* fn = a.fn + r * kStreams * a.channels + c;
      const float* next = r + NR < kCoefficients ? fn + NR * kStreams * a.channels : a.fn + c + kTile;
      dot_tile<NT, NR>(fn, next, a.channels, tiles, width, lanes + r * NT * W);
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    float* out = sums + ((t0 + t) * segments + segment) * kSums;
    if (a.fn) reduce_many<kCoefficients>(lanes + t * W, NT * W, out);
    const Running& s = run[t];
    out[kCoefficients] = reduce_add((s.squares[0] + s.squares[1]) + (s.squares[2] + s.squares[3]));
    out[kCoefficients + 1] = reduce_add(s.mix);
  }
}

void segment_of_tokens(const HcStep& a, int64_t t0, int64_t t1, int64_t segment, int64_t segments, float* sums) {
  while (t0 < t1) {
    const int64_t left = t1 - t0;
    const int64_t count = std::min<int64_t>(left, kMostTokens);
    if (count > 4) {
      segment_sums<kMostTokens>(a, t0, count, segment, segments, sums);
    } else if (count > 2) {
      segment_sums<4>(a, t0, count, segment, segments, sums);
    } else if (count > 1) {
      segment_sums<2>(a, t0, count, segment, segments, sums);
    } else {
      segment_sums<1>(a, t0, count, segment, segments, sums);
    }
    t0 += count;
  }
}

// Tokens [t0, t0 + count), count <= W: the sums become coefficients, and the mix gets its norm.
void finish(const HcStep& a, int64_t t0, int64_t count, int64_t segments, const float* sums) {
  alignas(64) float total[kSums][W] = {};
  for (int64_t t = 0; t < count; ++t) {
    const float* s = sums + (t0 + t) * segments * kSums;
    for (int64_t g = 0; g < segments; ++g)
      for (int r = 0; r < kSums; ++r) total[r][t] += s[g * kSums + r];
  }
  if (a.fn) {
    F32 dots[kCoefficients];
    for (int r = 0; r < kCoefficients; ++r) dots[r] = F32::load(total[r]);
    const Coefficients c = coefficients(dots, F32::load(total[kCoefficients]), a);
    alignas(64) float lane[W];
    const auto scatter = [&](F32 v, float* out, int stride) {
      v.store(lane);
      for (int64_t t = 0; t < count; ++t) out[(t0 + t) * stride] = lane[t];
    };
    for (int j = 0; j < kStreams; ++j) {
      scatter(c.pre[j], a.pre_out + j, kStreams);
      scatter(c.post[j], a.post_out + j, kStreams);
      for (int k = 0; k < kStreams; ++k) scatter(c.comb[j][k], a.comb_out + j * kStreams + k, kStreams * kStreams);
    }
  }
  if (a.mixed && a.norm_weight) {
    for (int64_t t = 0; t < count; ++t) {
      const float mean = total[kCoefficients + 1][t] / static_cast<float>(a.channels);
      const F32 rms = F32::set(1.0f / std::sqrt(mean + a.eps));
      float* x = a.mixed + (t0 + t) * a.channels;
      for (int64_t i = 0; i < a.channels; i += W)
        ((F32::load(x + i) * rms) * F32::load(a.norm_weight + i)).store(x + i);
    }
  }
}

// Tokens of a work item: many, so that fn is read from far away seldom, but not so many that threads stay idle.
int64_t tokens_an_item(int64_t tokens, int64_t segments) {
  const int64_t share = tokens * segments / (2 * omp_get_max_threads());
  return std::clamp(share / kMostTokens * kMostTokens, int64_t{kMostTokens}, kTokens);
}

}  // namespace

void hc_step(const HcStep& a) {
  const int64_t segments = (a.channels + kSegment - 1) / kSegment;
  const int64_t width = tokens_an_item(a.tokens, segments);
  const int64_t blocks = (a.tokens + width - 1) / width;
  const std::unique_ptr<float[]> sums(new float[a.tokens * segments * kSums]);
  const int64_t cost = (a.fn ? kCoefficients : 4) * kStreams * std::min(a.channels, kSegment) / 4;  // vectors
  kernel_core::parallel_for(blocks * segments, cost * std::min(a.tokens, width), [&](int64_t item) {
    const int64_t t0 = item / segments * width;
    segment_of_tokens(a, t0, std::min(a.tokens, t0 + width), item % segments, segments, sums.get());
  });
  if (!a.fn && !a.mixed) return;
  const int64_t groups = (a.tokens + W - 1) / W;
  kernel_core::parallel_for(groups, W * a.channels, [&](int64_t g) {
    finish(a, g * W, std::min<int64_t>(W, a.tokens - g * W), segments, sums.get());
  });
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mhc_engram
