// What the scoring kernel computes, thread by thread: images, operands as the tensor unit pairs them, sums in order.
#include "index_plan.cuh"

#include <algorithm>
#include <vector>

namespace plan = mla_fp4::index_plan;
namespace format = kernel_core::cuda;

namespace {

struct Packed {
  std::vector<uint8_t> image;
  std::vector<float> weights, factors;
  bool wide = false;
};

Packed pack(const float* q, const float* weights, int heads) {
  const int padded = plan::padded_heads(heads);
  Packed to;
  to.image.resize(static_cast<size_t>(padded * plan::kDim));
  to.weights.resize(static_cast<size_t>(padded));
  to.factors.resize(static_cast<size_t>(padded * plan::kGroups), 1.0f);
  for (int h = 0; h < heads; ++h) {
    format::GroupScale scales[plan::kGroups];
    uint32_t amax[plan::kGroups] = {}, top = 0;
    for (int g = 0; g < plan::kGroups; ++g) {
      for (int i = 0; i < plan::kGroup; ++i)
        amax[g] = std::max(amax[g], format::magnitude_bits(q[h * plan::kDim + g * plan::kGroup + i]));
      scales[g] = format::group_scale(format::IndexRow{}, amax[g]);
      top = std::max(top, scales[g].byte);
    }
    for (int c = 0; c < plan::kDim; ++c) {
      const int g = c / plan::kGroup;
      const plan::Fold fold = plan::fold(scales[g].byte, top, amax[g] == 0);
      to.factors[static_cast<size_t>(h * plan::kGroups + g)] = fold.factor;
      to.wide |= fold.factor != 1.0f;
      to.image[plan::image_byte(h, c)] = static_cast<uint8_t>(
          plan::folded_code(format::encode_scaled<format::IndexRow>(q[h * plan::kDim + c], scales[g]), fold.shift));
    }
    to.weights[static_cast<size_t>(h)] = plan::head_weight(weights[h], top);
  }
  return to;
}

// A key's 32 bytes of step `group` in the order of the product's K, from the four lanes that hold its row.
void key_step(const uint8_t* codes, int group, uint8_t out[32]) {
  for (int lane = 0; lane < 4; ++lane) {
    uint32_t piece, words[2];
    std::memcpy(&piece, codes + group * 16 + lane * 4, 4);
    plan::key_words(piece, words);
    std::memcpy(out + lane * 4, &words[0], 4);       // registers 0 and 1 of the operand
    std::memcpy(out + 16 + lane * 4, &words[1], 4);  // registers 2 and 3
  }
}

float score(const Packed& q, int padded, const uint8_t* codes, const uint8_t* scales) {
  float key_scales[plan::kGroups], lanes[4];
  uint8_t key[plan::kGroups][32];
  uint32_t scale_bytes;
  std::memcpy(&scale_bytes, scales, 4);
  plan::key_scales(scale_bytes, key_scales);
  for (int g = 0; g < plan::kGroups; ++g) key_step(codes, g, key[g]);
  for (int lane = 0; lane < 4; ++lane) {
    float sum = 0;
    for (int i = 0; i < padded / 4; ++i) {
      const int head = plan::head_of(lane, i);
      float steps[plan::kGroups];
      for (int g = 0; g < plan::kGroups; ++g) {
        double exact = 0;
        for (int k = 0; k < 32; ++k) {
          const auto at =
              kernel_core::wgmma::swizzle128(static_cast<uint32_t>(head), static_cast<uint32_t>(g * 32 + k));
          exact += static_cast<double>(format::e4m3_float(key[g][k])) * format::e4m3_float(q.image[at]);
        }
        steps[g] = static_cast<float>(exact);
        if (steps[g] != exact) return -1e30f;  // never: the sum of a step has 13 bits
        if (q.wide) steps[g] *= q.factors[static_cast<size_t>(head * plan::kGroups + g)];
      }
      sum = plan::fused(q.weights[static_cast<size_t>(head)], plan::relu(plan::dot(steps, key_scales)), sum);
    }
    lanes[lane] = sum;
  }
  return plan::quad_sum(lanes);
}

}  // namespace

extern "C" {

// out [rows, keys]; codes [keys, 64], scales [keys, 4]
void score_rows(const float* q, const float* weights, int rows, int heads, const uint8_t* codes, const uint8_t* scales,
                int keys, float* out) {
  for (int row = 0; row < rows; ++row) {
    const Packed packed = pack(q + row * heads * plan::kDim, weights + row * heads, heads);
    for (int key = 0; key < keys; ++key)
      out[row * keys + key] =
          score(packed, plan::padded_heads(heads), codes + key * plan::kCodeBytes, scales + key * plan::kGroups);
  }
}

// Eight values of a word of codes, as the kernel expands them
void key_values(uint32_t codes, float* out) {
  uint32_t words[2];
  plan::key_words(codes, words);
  for (int i = 0; i < 8; ++i) out[i] = format::e4m3_float(words[i % 2] >> (i / 2 * 8) & 0xFF);
}

void key_scales(uint32_t bytes, float* out) { plan::key_scales(bytes, out); }
float folded_value(uint32_t code, int shift) { return format::e4m3_float(plan::folded_code(code, shift)); }
int key_piece(int row, int group) { return plan::key_piece(row, group); }
uint32_t image_byte(int head, int channel) { return plan::image_byte(head, channel); }
int head_of(int lane, int i) { return plan::head_of(lane, i); }
int64_t keys_of_block(int64_t tiles, int64_t width, int64_t multiprocessors) {
  return plan::keys_of_block(tiles, width, multiprocessors);
}
float fold_factor(uint32_t scale, uint32_t top) { return plan::fold(scale, top, false).factor; }
int fold_shift(uint32_t scale, uint32_t top) { return plan::fold(scale, top, false).shift; }
}
