// Layout and plan of the expert kernels, for tests.
#include "cuda/sm90/expert_fp8.cuh"
#include "cuda/sm90/expert_plan.cuh"

#include <vector>

using namespace mega_moe::sm90;

namespace {

uint32_t word(const uint8_t* from) {
  uint32_t v;
  std::memcpy(&v, from, 4);
  return v;
}

// One block of 128 rows as float32 [128, columns].
template <Format F>
void decode(const uint8_t* packed, int columns, float* out) {
  using S = Step<F>;
  for (int step = 0; step < columns / S::kColumns; ++step)
    for (int tile = 0; tile < kTiles; ++tile)
      for (int piece = 0; piece < kPieces; ++piece)
        for (int thread = 0; thread < 128; ++thread) {
          const uint8_t* const from = packed + step * step_bytes(F);
          const uint8_t* const scale = from + kTiles * kTileCodes + tile * S::kScaleBytes;
          uint32_t codes[4], scales[2], a[S::kProducts][4];
          for (int i = 0; i < 4; ++i)
            codes[i] = word(from + tile * kTileCodes + piece * kPieceBytes + thread * 16 + 4 * i);
          if constexpr (F == Format::mxfp4) {
            scales[0] = word(scale + thread / 4 * 8 + 4 * piece), scales[1] = 0;
          } else {
            for (int r = 0; r < 2; ++r) scales[r] = cuda::mxfp8_factor(scale[thread / 32 * 4 + 2 * r + piece]);
          }
          expand_piece(codes, scales, a, S{});
          for (int j = 0; j < S::kProducts; ++j)
            for (int i = 0; i < 8; ++i) {
              const int reg = i / 2, row = tile * 64 + thread / 32 * 16 + thread % 32 / 4 + reg % 2 * 8;
              const int column = step * S::kColumns + (piece * S::kProducts + j) * 16 + thread % 4 * 2 + reg / 2 * 8;
              out[row * columns + column + i % 2] = cuda::bf16_float(a[j][reg] >> (i % 2 * 16) & 0xFFFF);
            }
        }
}

}  // namespace

extern "C" void decode_block(int fp8, const uint8_t* packed, int columns, float* out) {
  fp8 ? decode<Format::fp8>(packed, columns, out) : decode<Format::mxfp4>(packed, columns, out);
}

// The same for W4A8: codes as E4M3 times the rows' factors.
extern "C" void decode_block_fp8(const uint8_t* packed, const float* factor, int columns, float* out) {
  for (int step = 0; step < columns / 128; ++step)
    for (int tile = 0; tile < kTiles; ++tile)
      for (int piece = 0; piece < kPieces; ++piece)
        for (int thread = 0; thread < 128; ++thread) {
          const uint8_t* const from = packed + step * step_bytes(Format::mxfp4);
          uint32_t codes[4], a[2][4];
          for (int i = 0; i < 4; ++i)
            codes[i] = word(from + tile * kTileCodes + piece * kPieceBytes + thread * 16 + 4 * i);
          expand_piece_fp8(codes, word(from + kTiles * kTileCodes + tile * 256 + thread / 4 * 8 + 4 * piece), a[0],
                           a[1]);
          for (int j = 0; j < 2; ++j)
            for (int reg = 0; reg < 4; ++reg)
              for (int i = 0; i < 4; ++i) {
                const int row = tile * 64 + thread / 32 * 16 + thread % 32 / 4 + reg % 2 * 8;
                const int column = step * 128 + piece * 64 + j * 32 + reg / 2 * 16 + thread % 4 * 4 + i;
                out[row * columns + column] = cuda::e4m3_float(a[j][reg] >> (8 * i) & 0xFF) * factor[row];
              }
        }
}

extern "C" int place_of_bit(int reg, int half, int bit) { return code_bit(reg, half, bit); }

extern "C" int list_items(const int32_t* counts, int ordinals, int blocks1, int blocks2, int columns, int32_t* out,
                          int most) {
  ExpertPlan p{};
  p.ordinals = ordinals, p.blocks1 = blocks1, p.blocks2 = blocks2;
  for (int i = 0; i < ordinals; ++i) {
    p.count[i] = counts[i];
    p.first[i + 1] = p.first[i] + counts[i];
    p.tiles[i + 1] = p.tiles[i] + tiles_of(counts[i], columns);
    p.images[i + 1] = p.images[i] + image_rows(counts[i], columns);
  }
  for (int number = 0; number < most; ++number) {
    const Item item = find_item(p, number, columns);
    if (item.kind == Kind::end) return number;
    const int32_t row[8] = {static_cast<int>(item.kind),
                            item.ordinal,
                            item.block,
                            item.tile,
                            item.rows,
                            item.columns,
                            item.first_row,
                            item.image_row};
    std::memcpy(out + number * 8, row, sizeof(row));
  }
  return -1;
}

extern "C" int bound_of_images(int tokens, int slots, int experts, int shared, int columns) {
  return static_cast<int>(most_image_rows(tokens, slots, experts, shared, columns));
}
extern "C" int bound_of_tiles(int tokens, int slots, int experts, int shared, int columns) {
  return static_cast<int>(most_tiles(tokens, slots, experts, shared, columns));
}
