// Ops with code of their own for SM100: the device decides.
#pragma once

#include <algorithm>

#include "cuda/attention_narrow.hpp"
#include "cuda/attention_wide.hpp"
#include "cuda/device.hpp"
#include "cuda/index_score.hpp"
#include "cuda/sm100/attention_sm100.hpp"
#include "cuda/sm100/index_score_sm100.hpp"

namespace mla_fp4::cuda {

inline cudaError_t attention_on_device(const AttentionParams& a, int64_t heads_of_cta, int64_t multiprocessors,
                                       cudaStream_t stream) {
  if (device_is_sm100()) return sm100::attention_wide(a, 0, nullptr, stream);
  return heads_of_cta == 64 ? attention_wide(a, multiprocessors, stream)
                            : attention_narrow(a, heads_of_cta, multiprocessors, stream);
}

// Enough for either.
inline int64_t index_workspace_on_device(int64_t rows, int64_t heads) {
  return std::max(index_score_workspace(rows, heads), sm100::index_score_workspace(rows, heads));
}

inline cudaError_t index_score_on_device(IndexScoreParams const& p, cudaStream_t stream) {
  return device_is_sm100() ? sm100::index_score(p, stream) : index_score(p, stream);
}

}  // namespace mla_fp4::cuda
