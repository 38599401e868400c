// What ranks write for each other and read, between an endpoint's waits.
#pragma once

#include <vector>

#include "cpu/endpoint.hpp"

namespace ep_comm {

// Where a dispatch's rows go; `scales` is null without fp8.
struct Rows {
  uint8_t* x;
  float* scales;
  int32_t* ids;
  float* weights;
  int32_t* sources;
};

class Exchange {
 public:
  explicit Exchange(Endpoint& end) : end_(end), shape_(end.shape()) {}

  void write_tokens(const void* x, bool narrow, const int32_t* ids, const float* weights, int32_t tokens);
  // Rows from each source. Throws std::runtime_error for what no peer of this program writes.
  void counts(int32_t* counts) const;
  void read_tokens(const Rows& to, bool fixed);

  // `y` has a row a slot or a row a token, each of `fixed` or packed rows as they were read.
  void write_results(const void* y, bool narrow, bool slots);
  void read_results(float* out, bool slots) const;

  void write_gathered(const int64_t* row, int64_t n) const;
  void read_gathered(int64_t* rows, int64_t n) const;

 private:
  struct Row {
    int32_t home, token;
    int64_t row;
  };

  int32_t count_from(int source) const;

  Endpoint& end_;
  Shape shape_;
  int32_t tokens_ = 0;
  std::vector<int32_t> sent_;   // ids that this rank dispatched, [tokens, top_k]
  std::vector<Row> rows_;       // that came to this rank
  std::vector<int32_t> local_;  // experts of `rows_` on this rank, [rows, top_k]
};

}  // namespace ep_comm
