// A dense product over panels of weight rows, with and without packing the activations first.
#pragma once

#include <algorithm>

#include "fma_product.hpp"
#include "ranges.hpp"
#include "scratch.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

// The activations are used where they lie.
inline void linear_rows(const LinearArgs& a) {
  constexpr int64_t kPanel = FmaProduct::kPanel;
  const int64_t panels = (a.out + kPanel - 1) / kPanel;
  for_ranges(a.groups * panels, FmaProduct::cycles(kPanel, a.tokens, a.w.k), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t g = item / panels, o = item % panels * kPanel;
      FmaProduct::run_rows(a.w, g * a.out + o, std::min(kPanel, a.out - o), a.x + g * a.w.k, a.groups * a.w.k, a.tokens,
                           a.y + g * a.out + o, a.groups * a.out);
    }
  });
}

template <typename Product>
inline void linear_packed(const LinearArgs& a) {
  static thread_local Scratch scratch;
  const int64_t k = a.w.k, panel = Product::panel_rows(a.tokens, k), panels = (a.out + panel - 1) / panel;
  // As many tokens at a time as leave the packed activations in a few megabytes, a multiple of 16
  constexpr int64_t kBudget = 16 << 20;
  const int64_t chunk = std::max<int64_t>(16, kBudget / (Product::packed_bytes(16, k) * a.groups) * 16);
  for (int64_t first = 0; first < a.tokens; first += chunk) {
    const int64_t tokens = std::min(chunk, a.tokens - first);
    const int64_t bytes = Product::packed_bytes(tokens, k);
    char* packed = scratch.get<char>(a.groups * bytes);
    const float* x = a.x + first * a.groups * k;
    float* y = a.y + first * a.groups * a.out;
    Product::pack_groups(x, a.groups, tokens, k, a.w.format, packed);
    for_ranges(a.groups * panels, Product::cycles(panel, tokens, k), [&](int64_t begin, int64_t end) {
      Product product;
      for (int64_t item = begin; item < end; ++item) {
        const int64_t g = item / panels, o = item % panels * panel;
        product.run(a.w, g * a.out + o, std::min(panel, a.out - o), packed + g * bytes, tokens, y + g * a.out + o,
                    a.groups * a.out);
      }
    });
  }
}

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
