// Peak of the tile unit: four accumulator tiles, two operands, no loads in the loop.
#include <immintrin.h>
#include <omp.h>

#include <cstring>

#include "cpu/ceilings.hpp"

namespace kernel_core {
namespace amx {

int64_t bf16_flops(int64_t rounds, float* sink) {
  const int threads = omp_get_max_threads();
#pragma omp parallel num_threads(threads)
  {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;  // palette: up to 16 rows of 64 bytes a tile
    for (int t = 0; t < 8; ++t) {
      const uint16_t row_bytes = 64;
      std::memcpy(config + 16 + 2 * t, &row_bytes, 2);
      config[48 + t] = 16;
    }
    _tile_loadconfig(config);
    alignas(64) uint8_t operand[1024] = {};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, operand, 64);
    _tile_loadd(5, operand, 64);
    _tile_loadd(6, operand, 64);
    _tile_loadd(7, operand, 64);
    for (int64_t r = 0; r < rounds; ++r) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) float result[256];
    _tile_stored(0, result, 64);
    _tile_release();
#pragma omp critical
    *sink += result[0];
  }
  return rounds * 4 * 2 * 16 * 16 * 32 * threads;
}

}  // namespace amx
}  // namespace kernel_core
