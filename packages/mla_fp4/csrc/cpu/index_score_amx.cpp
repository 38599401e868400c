// Index scores with AMX-BF16 for packed keys.
//
// A code times its power-of-two scale has two significant bits, so keys and quantised queries are exact in bfloat16
// and the products are exact in float32; only the sum over channels rounds, in the fixed order of the tile unit
// (which flushes subnormals: what a scale below 2^-125 holds counts as zero). Keys are the rows of the product, one
// step for one scale group, and (row, head) pairs its columns:
//
//   keys [16 x 32] . queries [32 x 16] -> [16 keys x 16 columns], then relu, weights, and the sum over a row's heads.
//
// While the tile unit multiplies, the vector unit sums the heads of the products before.
#include <algorithm>
#include <vector>

#include "cpu/index_score.hpp"
#include "cpu/index_tiles_amx.hpp"
#include "cpu/key_walk.hpp"
#include "kernel_core/encode.hpp"

namespace mla_fp4 {
namespace amx {

namespace {

constexpr int kKeys = 64;  // decoded together: four tiles of rows

// Columns of one row: the heads, rounded up to a power of two that divides 32
int64_t row_columns(int64_t heads) {
  int64_t columns = 4;
  while (columns < heads) columns *= 2;
  return columns;
}

int64_t column_tiles(int64_t rows, int64_t heads) { return (rows * row_columns(heads) + kColumns - 1) / kColumns; }

// One key to its row of each step's tile. `kSteps` is the number of steps, or 0: as many as `steps` says.
template <int kSteps>
inline void decode_key(const uint8_t* codes, const uint8_t* scales, int64_t steps, const Words* tables, uint8_t* to) {
  const int64_t n = kSteps ? kSteps : steps;
  for (int64_t g = 0; g < n; ++g)
    _mm512_store_si512(to + g * kTileBytes, decode_group(codes + g * 16, tables[scales[g]]));
}

// Keys from `begin` on as tiles [16 keys][32 channels], the steps of a tile row next to each other; missing keys are
// zero. Keys that come soon are asked for meanwhile.
template <int kSteps>
void load_keys(const ScoreArgs& a, int64_t begin, uint8_t* tiles) {
  const int64_t steps = a.keys.dim / 32;
  const Words* tables = bf16_tables();
  const auto place = [&](int64_t key) { return tiles + (key / 16 * steps * 16 + key % 16) * 64; };
  KeyWalk coming(a, std::min(begin + 2 * kKeys, a.count), std::min(begin + 3 * kKeys, a.count));
  KeyRun ahead = coming.next(kKeys);
  for (; a.positions && ahead.count; ahead = coming.next(kKeys)) {  // the many short runs of a list: at once
    for (int64_t i = 0; i < ahead.count; ++i) _mm_prefetch(ahead.codes + i * steps * 16, _MM_HINT_T0);
    _mm_prefetch(ahead.scales, _MM_HINT_T0);
  }
  for (int64_t i = 0; i < ahead.count * steps; i += 64) _mm_prefetch(ahead.scales + i, _MM_HINT_T0);
  KeyWalk walk(a, begin, std::min<int64_t>(begin + kKeys, a.count));
  int64_t key = 0;
  for (KeyRun run; (run = walk.next(kKeys)).count;) {
    for (int64_t i = 0; i < run.count; ++i, ++key) {
      if (key < ahead.count) _mm_prefetch(ahead.codes + key * steps * 16, _MM_HINT_T0);
      decode_key<kSteps>(run.codes + i * steps * 16, run.scales + i * steps, steps, tables, place(key));
    }
  }
  for (; key < kKeys; ++key)
    for (int64_t g = 0; g < steps; ++g) _mm512_store_si512(place(key) + g * kTileBytes, _mm512_setzero_si512());
}

// Products that wait for relu, weights and the sum over heads
class Finish {
 public:
  explicit Finish(const ScoreArgs& a) : a_(a), columns_(row_columns(a.heads)) {}

  // Keys from `key` on and the column tiles from `tile` on, in the order of multiply_2x2 (`square`) or multiply_4x1
  void take(const Products& products, int64_t key, int64_t tile, bool square) {
    products_ = &products;
    key_ = key;
    tile_ = tile;
    square_ = square;
  }

  // One of four parts
  void part(int64_t i) {
    if (!products_) return;
    const int64_t key = key_ + (square_ ? i / 2 : i) * 16;
    if (!square_) return sum(key, tile_, products_->tile[i], nullptr);
    if (columns_ < 32) return sum(key, tile_ + i % 2, products_->tile[i], nullptr);
    if (i % 2 == 0) sum(key, tile_, products_->tile[i], products_->tile[i + 1]);
  }

 private:
  // `second` continues the columns of a row of 32
  void sum(int64_t key, int64_t tile, const float (*product)[16], const float (*second)[16]) {
    const __m512 zero = _mm512_setzero_ps();  // the first operand of max: NaN passes
    const __m512 w0 = _mm512_loadu_ps(a_.packed_weights + tile * kColumns);
    __m512 v[16], lanes[4];
    for (int k = 0; k < 16; ++k) v[k] = _mm512_mul_ps(_mm512_max_ps(zero, _mm512_load_ps(product[k])), w0);
    if (second) {
      const __m512 w1 = _mm512_loadu_ps(a_.packed_weights + (tile + 1) * kColumns);
      for (int k = 0; k < 16; ++k) v[k] = _mm512_fmadd_ps(_mm512_max_ps(zero, _mm512_load_ps(second[k])), w1, v[k]);
    }
    sum_lanes(v, lanes);
    const int64_t row = tile * kColumns / columns_;
    if (columns_ == 4) {
      for (int i = 0; i < 4; ++i) store(row + i, key, lanes[i]);
    } else if (columns_ == 8) {
      store(row, key, _mm512_add_ps(lanes[0], lanes[1]));
      store(row + 1, key, _mm512_add_ps(lanes[2], lanes[3]));
    } else {
      store(row, key, _mm512_add_ps(_mm512_add_ps(lanes[0], lanes[1]), _mm512_add_ps(lanes[2], lanes[3])));
    }
  }

  void store(int64_t row, int64_t key, __m512 scores) const {
    if (row >= a_.rows || key >= a_.count) return;
    _mm512_mask_storeu_ps(a_.out + row * a_.stride + key,
                          F32::mask(static_cast<int>(std::min<int64_t>(16, a_.count - key))), scores);
  }

  const ScoreArgs& a_;
  int64_t columns_;
  const Products* products_ = nullptr;
  int64_t key_ = 0, tile_ = 0;
  bool square_ = true;
};

}  // namespace

PackedSize packed_size(int64_t rows, int64_t heads, int64_t dim) {
  const int64_t tiles = column_tiles(rows, heads);
  return {tiles * (dim / 32) * kTileBytes, tiles * kColumns};
}

// Column tiles as [32 channels / 2][16 columns][2], the order of the second operand
void pack_queries(const PackArgs& a) {
  const int64_t steps = a.dim / 32, columns = row_columns(a.heads);
  const Words* tables = bf16_tables();
  auto* out = static_cast<uint8_t*>(a.packed);
  const PackedSize size = packed_size(a.rows, a.heads, a.dim);
  std::memset(out, 0, static_cast<size_t>(size.bytes));
  std::fill(a.packed_weights, a.packed_weights + size.weights, 0.0f);
  std::vector<uint8_t> codes(static_cast<size_t>(a.dim / 2)), scales(static_cast<size_t>(steps));
  alignas(64) uint32_t pairs[16];
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t column = row * columns + h;
      a.packed_weights[column] = a.weights[row * a.heads + h];
      encode_mxfp4_row(a.q + (row * a.heads + h) * a.dim, codes.data(), scales.data(), a.dim);
      for (int64_t g = 0; g < steps; ++g) {
        _mm512_store_si512(pairs, decode_group(codes.data() + g * 16, tables[scales[static_cast<size_t>(g)]]));
        auto* to = reinterpret_cast<uint32_t*>(out + (column / kColumns * steps + g) * kTileBytes) + column % kColumns;
        for (int i = 0; i < 16; ++i) to[i * kColumns] = pairs[i];
      }
    }
  }
}

void score_keys(const ScoreArgs& a) {
  static thread_local std::vector<uint8_t> buffer;
  const int64_t steps = a.keys.dim / 32, tiles = column_tiles(a.rows, a.heads);
  buffer.resize(static_cast<size_t>(kKeys / 16 * steps * kTileBytes + 64));
  auto* keys = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t{63});
  const auto* queries = static_cast<const uint8_t*>(a.packed);

  Products products[2];
  int turn = 0;
  Finish before(a);
  const auto between = [&](int64_t step) {
    for (int64_t i = 4 * step / steps; i < 4 * (step + 1) / steps; ++i) before.part(i);
  };
  static const TileConfig config;
  finish_stores();
  _tile_loadconfig(&config);
  for (int64_t begin = 0; begin < a.count; begin += kKeys) {
    steps == 4 ? load_keys<4>(a, begin, keys) : load_keys<0>(a, begin, keys);
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const uint8_t* columns = queries + tile * steps * kTileBytes;
      if (tile + 1 == tiles) {
        multiply_4x1(keys, columns, steps, products[turn], between);
        before.take(products[turn], begin, tile, false);
        turn ^= 1;
        break;
      }
      for (int64_t half = 0; half < kKeys && begin + half < a.count; half += 32) {
        multiply_2x2(keys + half / 16 * steps * kTileBytes, columns, steps, products[turn], between);
        before.take(products[turn], begin + half, tile, true);
        turn ^= 1;
      }
    }
  }
  for (int64_t i = 0; i < 4; ++i) before.part(i);
  _tile_release();
}

}  // namespace amx
}  // namespace mla_fp4
