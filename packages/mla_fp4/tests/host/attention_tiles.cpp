// The attention kernels' arithmetic on the host, one row at a time.
#include "cuda/sm90/attention_tiles.cuh"

#include <cmath>
#include <vector>

#include "kernel_core/cuda/wgmma.cuh"

using namespace mla_fp4::cuda;
namespace kc = kernel_core::cuda;
namespace wgmma = kernel_core::wgmma;

namespace {

using Tile = std::vector<uint16_t>;

// Stored bytes of one key (null: none) to its row of a tile, by the pieces that a producer's lanes write.
void fill_key(Tile& tile, int key, const uint8_t* row, bool main) {
  for (int n = 0; n < 16; ++n) {  // 32 columns each
    const auto store = [&](int w, const uint32_t (&v)[4]) {
      std::memcpy(reinterpret_cast<uint8_t*>(tile.data()) + tile_piece(key, n / 4, n % 4, w), v, 16);
    };
    Unit codes[2] = {};
    uint32_t scale = 0;
    if (row) std::memcpy(codes, row + n * (main ? 16 : 32), main ? 16 : 32);
    if (row) std::memcpy(&scale, row + (main ? kDim / 2 + 2 * n : kDim + n), main ? 2 : 1);
    main ? decode_main(codes[0], scale, store) : decode_window(codes, scale, window_scale_is_large(scale), store);
  }
}

// What a product reads: the swizzle's own formula.
uint16_t tile_bits(const Tile& tile, int key, int column) {
  return tile[(column / 64 * kColumnBytes + wgmma::swizzle128(key, column % 64 * 2)) / 2];
}

AttentionParams sizes(int64_t rows_per_block, int64_t blocks, int64_t table_width) {
  AttentionParams a = {};
  a.rows_per_block = rows_per_block, a.blocks = blocks, a.table_width = table_width;
  return a;
}

// Where key `place` of tile `t` of a row lies.
struct Row {
  RowPlace place;
  int64_t window, ring_rows, selected;
  const int32_t *indices, *table;
  AttentionParams pool;

  KeyRow key(int t, int k) const {
    if (t < kWindowTiles) return window_key(place, t * kTileKeys + k, window, ring_rows);
    const int64_t n = (t - kWindowTiles) * kTileKeys + k;
    if (n >= selected) return kNoKey;
    const BlockOf in = block_of(indices[n], pool);
    return in.reached ? selected_key(table[in.slot], in.offset, pool) : kNoKey;
  }
};

// One head of a row, as both kernels sum: two denominators by the tile's parity, weights of neighbouring keys first,
// then of the eight groups of eight in order, then of the four pairs.
struct Head {
  float reference = minus_infinity(), denominator[2] = {0, 0}, o[kDim] = {};
  int moves = 0;  // of the reference, the first one not counted

  void take(const std::vector<float>& keys, const uint8_t* seen, const float* q, float scale, int t) {
    float s[kTileKeys], top = minus_infinity();
    for (int k = 0; k < kTileKeys; ++k) {
      s[k] = 0;
      for (int d = 0; d < kDim; ++d) s[k] += q[d] * keys[k * kDim + d];
      if (!seen[k]) s[k] = minus_infinity();
      top = std::fmax(top, s[k]);
    }
    const float next = next_reference(reference, top * scale), f = rescale(reference, next);
    moves += f != 1 && reference != minus_infinity();
    reference = next;
    for (float& x : denominator) x *= f;
    for (float& x : o) x *= f;
    float pairs[4] = {};
    for (int k = 0; k < kTileKeys; k += 2) {
      pairs[k % 8 / 2] += weight(s[k], scale, next) + weight(s[k + 1], scale, next);
    }
    denominator[t % 2] += (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
    for (int k = 0; k < kTileKeys; ++k) {
      const float p = kc::round_bf16(weight(s[k], scale, next));
      for (int d = 0; d < kDim; ++d) o[d] += p * keys[k * kDim + d];
    }
  }

  void finish(float sink, const float* rope, float* out) {
    const float factor = finish_factor(reference, denominator[0] + denominator[1], sink * kLog2E) * kKeyFactor;
    for (int d = 0; d < kDim; d += 2) {
      float even = o[d] * factor, odd = o[d + 1] * factor;
      if (const int angle = (d - (kDim - kRopeDim)) / 2; d >= kDim - kRopeDim) {
        const float c = rope[angle], s = rope[kRopeDim / 2 + angle], turned = fma_rn(even, c, odd * s);
        odd = fma_rn(odd, c, -(even * s));
        even = turned;
      }
      out[d] = kc::round_bf16(even), out[d + 1] = kc::round_bf16(odd);
    }
  }
};

}  // namespace

extern "C" {

uint64_t k_major(uint32_t address) { return wgmma::k_major(address); }
uint64_t mn_major(uint32_t address, uint32_t next) { return wgmma::mn_major(address, next); }
uint64_t advance(uint64_t d, uint32_t bytes) { return wgmma::advance(d, bytes); }
uint32_t swizzle128(uint32_t row, uint32_t byte) { return wgmma::swizzle128(row, byte); }
uint32_t swizzle128_offset(uint32_t offset) { return wgmma::swizzle128_offset(offset); }
int accumulator_row(int thread) { return wgmma::accumulator_row(thread); }
int accumulator_column(int thread) { return wgmma::accumulator_column(thread); }
uint32_t piece(int key, int q, int u, int w) { return tile_piece(key, q, u, w); }
int tiles_of(int64_t selected) { return tile_count(selected); }
int64_t heads_of_cta(int64_t rows, int64_t heads, int64_t multiprocessors) {
  return attention_heads_of_cta(rows, heads, multiprocessors);
}

// 32 columns each: 16 bytes of codes and two scales of a main row, 32 bytes and one scale of a window row.
void main_columns(const uint8_t* codes, const uint16_t* scales, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Unit unit;
    std::memcpy(&unit, codes + i * 16, 16);
    decode_main(unit, scales[i], [&](int w, const uint32_t (&v)[4]) { std::memcpy(out + i * 32 + w * 8, v, 16); });
  }
}
// `mixed`: as beside a large scale.
void window_columns(const uint8_t* codes, const uint8_t* scales, bool mixed, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Unit units[2];
    std::memcpy(units, codes + i * 32, 32);
    decode_window(units, scales[i], mixed || window_scale_is_large(scales[i]),
                  [&](int w, const uint32_t (&v)[4]) { std::memcpy(out + i * 32 + w * 8, v, 16); });
  }
}

// 64 stored rows through the pieces of a tile, and back as products read it: [64, 512].
void through_tile(const uint8_t* rows, bool main, uint16_t* out) {
  Tile tile(kTileBytes / 2, 0x7FFF);
  for (int key = 0; key < kTileKeys; ++key)
    fill_key(tile, key, rows + key * (main ? kMainRowBytes : kWindowRowBytes), main);
  for (int key = 0; key < kTileKeys; ++key)
    for (int d = 0; d < kDim; ++d) out[key * kDim + d] = tile_bits(tile, key, d);
}

// The keys of a row in the order of its tiles. Kinds: -1 none, 0 ring, 1 new row, 2 pool.
void walk(int64_t row, int64_t first_row, int64_t start, int64_t lower, int32_t slot, int64_t window, int64_t ring_rows,
          const int32_t* indices, int64_t selected, const int32_t* table, int64_t table_width, int64_t rows_per_block,
          int64_t blocks, int32_t* kind, int64_t* source) {
  const Row r = {row_place(row, first_row, start, lower, slot, window, ring_rows),
                 window,
                 ring_rows,
                 selected,
                 indices,
                 table,
                 sizes(rows_per_block, blocks, table_width)};
  for (int at = 0; at < tile_count(selected) * kTileKeys; ++at) {
    const int t = at / kTileKeys;
    const KeyRow key = r.key(t, at % kTileKeys);
    const bool main = t >= kWindowTiles;
    kind[at] = key == kNoKey ? -1 : main ? 2 : key & kNewRow ? 1 : 0;
    source[at] = key == kNoKey ? -1 : main ? main_offset(key) : window_offset(key);
  }
}

void softmax_step(float reference, float top, float product, float scale, float* out) {
  const float next = next_reference(reference, top);
  out[0] = next, out[1] = rescale(reference, next), out[2] = weight(product, scale, next);
}
float factor(float reference, float denominator, float sink) { return finish_factor(reference, denominator, sink); }

// A row of the only request, all heads: q float32 [heads, 512], out [heads, 512]. How often references moved.
int attend(const float* q, int64_t heads, int64_t row, int64_t start, int64_t lower, int32_t slot, int64_t window,
           const uint8_t* new_rows, const uint8_t* ring, int64_t ring_rows, const uint8_t* pages, int64_t blocks,
           int64_t rows_per_block, const int32_t* table, int64_t table_width, const int32_t* indices, int64_t selected,
           const float* sink, const float* rope, float softmax_scale, float* out) {
  const Row r = {row_place(row, 0, start, lower, slot, window, ring_rows),
                 window,
                 ring_rows,
                 selected,
                 indices,
                 table,
                 sizes(rows_per_block, blocks, table_width)};
  const float scale = softmax_scale * (kLog2E * kKeyFactor);
  std::vector<Head> state(heads);
  std::vector<float> keys(kTileKeys * kDim);
  for (int t = 0; t < tile_count(selected); ++t) {
    Tile tile(kTileBytes / 2, 0x7FFF);
    uint8_t seen[kTileKeys];
    for (int k = 0; k < kTileKeys; ++k) {
      const KeyRow key = r.key(t, k);
      const bool main = t >= kWindowTiles;
      seen[k] = key != kNoKey;
      const uint8_t* from = main            ? pages + main_offset(key)
                            : key & kNewRow ? new_rows + window_offset(key)
                                            : ring + window_offset(key);
      fill_key(tile, k, seen[k] ? from : nullptr, main);
      for (int d = 0; d < kDim; ++d) keys[k * kDim + d] = kc::bf16_float(tile_bits(tile, k, d));
    }
    for (int64_t h = 0; h < heads; ++h) state[h].take(keys, seen, q + h * kDim, scale, t);
  }
  int moves = 0;
  for (int64_t h = 0; h < heads; ++h) {
    state[h].finish(sink[h], rope, out + h * kDim);
    moves += state[h].moves;
  }
  return moves;
}

// `change`: which size or address to set to `value` in arguments that fit.
bool fits(int change, int64_t value) {
  alignas(16) static uint8_t some[32] = {};
  AttentionParams a = {};
  a.q = a.out = some, a.new_rows = a.ring = a.pages = some, a.sink = a.rope = reinterpret_cast<float*>(some);
  a.cu_seqlens = a.ring_slot = a.indices = a.block_table = reinterpret_cast<int32_t*>(some);
  a.start_pos = a.lower = reinterpret_cast<int64_t*>(some);
  a.rows = 3, a.heads = 64, a.batch = 2, a.slots = 4, a.ring_rows = 134, a.window = 128, a.selected = 512;
  a.blocks = 9, a.rows_per_block = 64, a.table_width = 7, a.scale = 0.5f;
  int64_t* const at[] = {&a.rows,   &a.heads,    &a.batch,  &a.slots,          &a.ring_rows,
                         &a.window, &a.selected, &a.blocks, &a.rows_per_block, &a.table_width};
  const int numbers = sizeof(at) / sizeof(at[0]);
  if (change >= 0 && change < numbers) *at[change] = value;
  if (change == numbers) a.scale = static_cast<float>(value);
  if (change == numbers + 1) a.q = some + value;
  if (change == numbers + 2) a.indices = nullptr, a.selected = value;
  return attention_fits(a);
}
}
