// The chance that a draft and all before it are accepted.
#pragma once

namespace dspark_kernels {

// NaN and negative confidences count as 0 and those above 1 as 1: so it never rises along a request, and is never -0.
constexpr float survive(float before, float confidence) {
  if (!(confidence > 0.0f)) return 0.0f;
  return confidence < 1.0f ? before * confidence : before;
}

}  // namespace dspark_kernels
