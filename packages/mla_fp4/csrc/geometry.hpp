// The ragged batch: request b owns rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. Checks that need the numbers
// themselves run here, before a kernel writes anything; pybind11 turns std::invalid_argument into ValueError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mla_fp4 {

inline void fail(const std::string& argument, int64_t got, const std::string& allowed) {
  throw std::invalid_argument(argument + ": got " + std::to_string(got) + ", allowed is " + allowed);
}

inline void check_cu_seqlens(const int32_t* cu, int64_t batch, int64_t rows) {
  if (cu[0] != 0) fail("cu_seqlens[0]", cu[0], "0");
  for (int64_t b = 0; b < batch; ++b)
    if (cu[b + 1] < cu[b])
      fail("cu_seqlens[" + std::to_string(b + 1) + "]", cu[b + 1],
           "at least the entry before, " + std::to_string(cu[b]));
  if (cu[batch] != rows) fail("cu_seqlens[" + std::to_string(batch) + "]", cu[batch], std::to_string(rows) + " rows");
}

inline void check_range(const char* argument, int64_t at, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    fail(std::string(argument) + "[" + std::to_string(at) + "]", value,
         std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace mla_fp4
