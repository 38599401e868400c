#include "bindings.hpp"
#include "indexer.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

namespace mla_fp4 {
namespace {

IndexArgs index_args(uintptr_t q, uintptr_t weights, uintptr_t pages, uintptr_t table, uintptr_t cu, uintptr_t visible,
                     int64_t rows, int64_t heads, int64_t dim, int64_t batch, int64_t table_width, int64_t blocks,
                     int64_t rows_per_block, bool packed) {
  return {pointer<const float>(q),
          pointer<const float>(weights),
          {pointer<const uint8_t>(pages), rows_per_block, dim, packed},
          blocks,
          pointer<const int32_t>(table),
          table_width,
          pointer<const int32_t>(cu),
          pointer<const int32_t>(visible),
          batch,
          rows,
          heads};
}

}  // namespace
}  // namespace mla_fp4

void bind_indexer(py::module_& m) {
  using namespace mla_fp4;
  m.def(
      "index_topk",
      [](uintptr_t q, uintptr_t weights, uintptr_t pages, uintptr_t table, uintptr_t cu, uintptr_t visible,
         int64_t rows, int64_t heads, int64_t dim, int64_t batch, int64_t table_width, int64_t blocks,
         int64_t rows_per_block, bool packed, uintptr_t candidates, int64_t candidate_width, int64_t candidate_block,
         int64_t k, uintptr_t out, int64_t publish, uintptr_t published) {
        index_topk(index_args(q, weights, pages, table, cu, visible, rows, heads, dim, batch, table_width, blocks,
                              rows_per_block, packed),
                   {pointer<const int32_t>(candidates), candidate_width, candidate_block}, k, pointer<int32_t>(out),
                   publish, pointer<int32_t>(published));
      },
      NoGil());
  m.def(
      "index_scores",
      [](uintptr_t q, uintptr_t weights, uintptr_t pages, uintptr_t table, uintptr_t cu, uintptr_t visible,
         int64_t rows, int64_t heads, int64_t dim, int64_t batch, int64_t table_width, int64_t blocks,
         int64_t rows_per_block, bool packed, uintptr_t out, int64_t width) {
        index_scores(index_args(q, weights, pages, table, cu, visible, rows, heads, dim, batch, table_width, blocks,
                                rows_per_block, packed),
                     pointer<float>(out), width);
      },
      NoGil());
}
