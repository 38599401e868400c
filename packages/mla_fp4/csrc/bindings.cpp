#include "bindings.hpp"

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
  bind_norm(m);
  bind_rows(m);
  bind_compressor(m);
  bind_attention(m);
  bind_indexer(m);
}
