// Norm and rotation of values that a thread holds. The formulas and their roundings are those of csrc/cpu/norm_row.hpp,
// but for the order in which squares are summed.
#pragma once

#include "kernel_core/cuda/hd.cuh"

namespace mla_fp4::cuda {

using namespace kernel_core::cuda;

// 1 / sqrt(sum / d + eps), every step rounded once
KC_HD float norm_factor(float sum_of_squares, int64_t d, float eps) {
  return div_rn(1.0f, sqrt_rn(add_rn(div_rn(sum_of_squares, static_cast<float>(d)), eps)));
}

KC_HD float norm_value(float x, float factor, float weight) { return mul_rn(mul_rn(x, factor), weight); }

// (a, b) -> (a cos - b sin, a sin + b cos), products and sums rounded apart
KC_HD void rotate_pair(float& a, float& b, float cosine, float sine) {
  const float turned = add_rn(mul_rn(a, cosine), -mul_rn(b, sine));
  b = add_rn(mul_rn(a, sine), mul_rn(b, cosine));
  a = turned;
}

}  // namespace mla_fp4::cuda
