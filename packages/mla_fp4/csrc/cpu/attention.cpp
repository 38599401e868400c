#include "cpu/attention.hpp"

#include "kernel_core/attention.hpp"

namespace mla_fp4 {
namespace KERNEL_CORE_ISA {

void sparse_attention(const kernel_core::AttentionArgs& args) { kernel_core::KERNEL_CORE_ISA::attend(args); }

}  // namespace KERNEL_CORE_ISA
}  // namespace mla_fp4
