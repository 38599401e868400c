// Which drafts of a step are verified, and where the rows of each request stand.
#pragma once

#include <cstdint>

namespace dspark_kernels {

struct Schedule {
  int64_t requests, drafts, capacity;
  const float* confidence;       // [S, G]
  const int64_t* tokens;         // [S, 1 + G]
  const int64_t* starts;         // [S]
  const int32_t* limits;         // [R], -1 for padding
  const int32_t* slots;          // [R] or null
  const int32_t* fixed;          // [R] or null
  int64_t budget;                // drafts over all requests under the budget
  const int32_t* device_budget;  // instead of `budget`, or null
  int32_t *lengths, *cu_rows;
  float* survival;
  int32_t *owner, *place, *source, *row_of;
  int64_t *input_tokens, *positions;
  int32_t *kv_lengths, *host;
};

// Rows that the requests need without any budgeted draft, if they do not fit in the capacity; otherwise 0.
int64_t schedule(const Schedule& a);

}  // namespace dspark_kernels
