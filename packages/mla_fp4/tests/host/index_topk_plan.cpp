#include "index_topk_plan.hpp"

extern "C" void parts(int64_t rows, int64_t width, int64_t k, int64_t floats, int64_t* out) {
  const auto p = mla_fp4::index_topk_plan::parts(rows, width, k, floats);
  out[0] = p.rows, out[1] = p.positions, out[2] = p.stride;
}
