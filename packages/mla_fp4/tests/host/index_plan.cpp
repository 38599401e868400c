// What the scoring kernel computes, thread by thread: images, operands as the tensor unit pairs them, sums in order.
#include "index_plan.cuh"

#include <algorithm>
#include <vector>

namespace plan = mla_fp4::index_plan;
namespace format = kernel_core::cuda;

namespace {

struct Packed {
  std::vector<uint8_t> image;
  std::vector<float> weights;
};

Packed pack(const float* q, const float* weights, int heads) {
  const int padded = plan::padded_heads(heads);
  Packed to;
  to.image.resize(static_cast<size_t>(padded * plan::kDim));
  to.weights.resize(static_cast<size_t>(padded));
  for (int h = 0; h < heads; ++h) {
    format::GroupScale scales[plan::kGroups];
    uint32_t top = 0;
    for (int g = 0; g < plan::kGroups; ++g) {
      uint32_t amax = 0;
      for (int i = 0; i < plan::kGroup; ++i)
        amax = std::max(amax, format::magnitude_bits(q[h * plan::kDim + g * plan::kGroup + i]));
      scales[g] = format::group_scale(format::IndexRow{}, amax);
      top = std::max(top, scales[g].byte);
    }
    for (int c = 0; c < plan::kDim; ++c) {
      const format::GroupScale& scale = scales[c / plan::kGroup];
      to.image[plan::image_byte(h, c)] = static_cast<uint8_t>(plan::shifted_code(
          format::encode_scaled<format::IndexRow>(q[h * plan::kDim + c], scale), static_cast<int>(top - scale.byte)));
    }
    to.weights[static_cast<size_t>(plan::weight_place(h, padded))] = plan::head_weight(weights[h], top);
  }
  return to;
}

// A key's 128 bytes in the order of the product's K, from the four lanes that hold its row; returns the largest scale.
uint32_t key_bytes(const uint8_t* codes, const uint8_t* scales, uint8_t out[plan::kDim]) {
  const uint32_t top = *std::max_element(scales, scales + plan::kGroups);
  for (uint32_t lane = 0; lane < 4; ++lane) {
    const uint32_t depth = plan::depth_pairs(top | top << 16, scales[lane] | top << 16) & 0xFFFF;
    const uint64_t table = plan::magnitudes(static_cast<int>(depth));
    for (uint32_t step = 0; step < plan::kSteps; ++step) {
      uint32_t piece, words[2];
      std::memcpy(&piece, codes + lane * 16 + step * 4, 4);
      plan::key_words(piece, static_cast<uint32_t>(table), static_cast<uint32_t>(table >> 32), words);
      std::memcpy(out + step * 32 + lane * 4, &words[0], 4);       // registers 0 and 1 of the operand
      std::memcpy(out + step * 32 + 16 + lane * 4, &words[1], 4);  // registers 2 and 3
    }
  }
  return top;
}

// A sum as the tensor unit forms it: per step, products and the sum so far cut to `bits` below the largest of them.
// 0: exact, rounded once.
double unit_sum(const uint8_t key[plan::kDim], const uint8_t* image, int head, int bits) {
  double sum = 0;
  for (uint32_t step = 0; step < plan::kSteps; ++step) {
    double terms[33] = {}, largest = std::fabs(sum);
    for (uint32_t k = 0; k < 32; ++k) {
      const auto at = kernel_core::wgmma::swizzle128(static_cast<uint32_t>(head), step * 32 + k);
      terms[k] = static_cast<double>(format::e4m3_float(key[step * 32 + k])) * format::e4m3_float(image[at]);
      largest = std::max(largest, std::fabs(terms[k]));
    }
    terms[32] = sum;
    const double unit = bits == 0 || largest == 0 ? 0 : std::ldexp(1.0, std::ilogb(largest) - bits);
    sum = 0;
    for (double term : terms) sum += unit == 0 ? term : std::trunc(term / unit) * unit;
  }
  return sum;
}

float score(const Packed& q, int padded, const uint8_t* codes, const uint8_t* scales, int bits) {
  float lanes[4];
  uint8_t key[plan::kDim];
  const uint32_t top = key_bytes(codes, scales, key);
  for (int lane = 0; lane < 4; ++lane) {
    lanes[lane] = 0;
    for (int i = 0; i < padded / 4; ++i) {
      const int head = plan::head_of(lane, i);
      const auto dot = static_cast<float>(unit_sum(key, q.image.data(), head, bits));
      lanes[lane] =
          plan::fused(q.weights[static_cast<size_t>(lane * (padded / 4) + i)], plan::twice_relu(dot), lanes[lane]);
    }
  }
  return format::mul_rn(plan::quad_sum(lanes), plan::key_factor(top));
}

}  // namespace

extern "C" {

// out [rows, keys]; codes [keys, 64], scales [keys, 4]; `bits` of the tensor unit's sums, 0: all
void score_rows(const float* q, const float* weights, int rows, int heads, const uint8_t* codes, const uint8_t* scales,
                int keys, int bits, float* out) {
  for (int row = 0; row < rows; ++row) {
    const Packed packed = pack(q + row * heads * plan::kDim, weights + row * heads, heads);
    for (int key = 0; key < keys; ++key)
      out[row * keys + key] =
          score(packed, plan::padded_heads(heads), codes + key * plan::kCodeBytes, scales + key * plan::kGroups, bits);
  }
}

// Eight values of a word of codes in a group `depth` binades below the top, as the kernel expands them
void key_values(uint32_t codes, int depth, float* out) {
  uint32_t words[2];
  const uint64_t table = plan::magnitudes(depth);
  plan::key_words(codes, static_cast<uint32_t>(table), static_cast<uint32_t>(table >> 32), words);
  for (int i = 0; i < 8; ++i) out[i] = format::e4m3_float(words[i % 2] >> (i / 2 * 8) & 0xFF);
}

float key_factor(uint32_t top) { return plan::key_factor(top); }
float shifted_value(uint32_t code, int depth) { return format::e4m3_float(plan::shifted_code(code, depth)); }
uint32_t depths(uint32_t top, uint32_t own) { return plan::depth_pairs(top, own); }
uint32_t tops(uint32_t a, uint32_t b) { return plan::max_pairs(a, b); }
uint32_t image_byte(int head, int channel) { return plan::image_byte(head, channel); }
int head_of(int lane, int i) { return plan::head_of(lane, i); }
int weight_place(int head, int heads) { return plan::weight_place(head, heads); }
int64_t keys_of_block(int64_t tiles, int64_t width, int64_t places, int64_t unit) {
  return plan::keys_of_block(tiles, width, places, unit);
}
}
