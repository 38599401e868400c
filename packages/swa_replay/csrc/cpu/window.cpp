#include "cpu/window.hpp"

#include "kernel_core/attention.hpp"

namespace swa_replay {
namespace KERNEL_CORE_ISA {

void window_attention(const kernel_core::AttentionArgs& args) { kernel_core::KERNEL_CORE_ISA::attend(args); }

}  // namespace KERNEL_CORE_ISA
}  // namespace swa_replay
