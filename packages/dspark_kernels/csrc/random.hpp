// Counter-based random numbers: a pure function of (seed, position, draw), so that a token does not depend on its
// place in a batch, on threads, or on what was drawn before.
#pragma once

#include <cstdint>

namespace dspark_kernels {

// The output function of SplitMix64 (Steele, Lea, Flood 2014); a bijection of 64-bit words.
constexpr uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr int64_t kDraws = 8;  // draws at one position

// In (0, 1), both ends excluded: the middle of one of 2^52 equal cells.
constexpr double uniform(int64_t seed, int64_t position, int64_t draw) {
  const uint64_t key = mix64(static_cast<uint64_t>(seed) + kGolden);
  const uint64_t counter = static_cast<uint64_t>(position) * kDraws + static_cast<uint64_t>(draw);
  const uint64_t word = mix64(key + kGolden * (counter + 1));
  return (static_cast<double>(word >> 12) + 0.5) * 0x1p-52;
}

}  // namespace dspark_kernels
