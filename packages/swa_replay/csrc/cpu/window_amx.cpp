#include "cpu/window.hpp"

#include "kernel_core/attention_amx.hpp"

namespace swa_replay {
namespace amx {

void window_attention(const kernel_core::AttentionArgs& args) { kernel_core::amx::attend_amx(args); }

}  // namespace amx
}  // namespace swa_replay
