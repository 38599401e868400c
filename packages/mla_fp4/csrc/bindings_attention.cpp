#include "bindings.hpp"
#include "cpu/attention.hpp"

namespace py = pybind11;
using kernel_core::AttentionArgs;
using kernel_core::NoGil;
using kernel_core::pointer;

void bind_attention(py::module_& m) {
  m.def(
      "sparse_attention",
      [](uintptr_t q, uintptr_t new_rows, uintptr_t ring, uintptr_t ring_slot, uintptr_t cu_seqlens,
         uintptr_t start_pos, uintptr_t lower, uintptr_t pages, uintptr_t block_table, uintptr_t indices,
         uintptr_t sink, uintptr_t rope, uintptr_t out, int64_t rows, int64_t heads, int64_t dim, int64_t batch,
         int64_t slots, int64_t ring_rows, int64_t window, int64_t blocks, int64_t rows_per_block, int64_t table_width,
         int64_t selected, int64_t rope_dim, float scale, bool packed) {
        AttentionArgs a{};
        a.q = pointer<const float>(q);
        a.out = pointer<float>(out);
        a.rows = rows, a.heads = heads, a.dim = dim, a.packed = packed;
        a.cu_seqlens = pointer<const int32_t>(cu_seqlens);
        a.start_pos = pointer<const int64_t>(start_pos);
        a.batch = batch;
        a.new_rows = pointer<const uint8_t>(new_rows);
        a.ring = pointer<const uint8_t>(ring);
        a.slots = slots, a.ring_rows = ring_rows;
        a.ring_slot = pointer<const int32_t>(ring_slot);
        a.lower = pointer<const int64_t>(lower);
        a.window = window;
        a.indices = pointer<const int32_t>(indices);
        a.selected = selected;
        a.pages = pointer<const uint8_t>(pages);
        a.blocks = blocks, a.rows_per_block = rows_per_block;
        a.block_table = pointer<const int32_t>(block_table);
        a.table_width = table_width;
        a.sink = pointer<const float>(sink);
        a.rope = pointer<const float>(rope);
        a.rope_dim = rope_dim, a.scale = scale;
        kernel_core::check_attention(a);
        using namespace mla_fp4;
#if defined(KERNEL_CORE_HAS_AMX)
        if (kernel_core::active_isa() >= kernel_core::Isa::amx) return amx::sparse_attention(a);
#endif
        KERNEL_CORE_PICK(sparse_attention)(a);
      },
      NoGil());
}
