#include "cpu/attention.hpp"

#include "kernel_core/attention_amx.hpp"

namespace mla_fp4 {
namespace amx {

void sparse_attention(const kernel_core::AttentionArgs& args) { kernel_core::amx::attend_amx(args); }

}  // namespace amx
}  // namespace mla_fp4
