// Which tokens each expert works on: a counting sort of (token, slot) pairs by expert.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "matrix.hpp"

namespace mega_moe {

// The pairs of one expert are consecutive and in token order. The shared expert, if any, comes last and takes
// every token in slot top_k.
struct ExpertPlan {
  struct Group {
    int32_t expert;  // -1 = the shared expert
    int32_t begin, count;
  };
  std::vector<Group> groups;     // experts that have tokens
  std::vector<int32_t> token;    // of each pair, relative to the first token of the plan
  std::vector<float> weight;     // of each pair
  std::vector<int32_t> pair_of;  // [tokens, slots] -> pair, -1 = none
  int64_t slots = 0;

  void build(const ExpertsArgs& a, int64_t first, int64_t tokens) {
    const bool shared = a.shared_inter > 0;
    slots = a.top_k + (shared ? 1 : 0);
    start_.assign(static_cast<size_t>(a.experts + 1), 0);
    const int32_t* ids = a.ids + first * a.top_k;
    const float* weights = a.weights + first * a.top_k;
    for (int64_t i = 0; i < tokens * a.top_k; ++i)
      if (ids[i] >= 0) ++start_[static_cast<size_t>(ids[i]) + 1];
    groups.clear();
    for (int64_t e = 0; e < a.experts; ++e) {
      const int32_t count = start_[e + 1];
      if (count) groups.push_back({static_cast<int32_t>(e), start_[e], count});
      start_[e + 1] += start_[e];
    }
    const int32_t routed = start_[static_cast<size_t>(a.experts)];
    const int64_t pairs = routed + (shared ? tokens : 0);
    token.resize(static_cast<size_t>(pairs));
    weight.resize(static_cast<size_t>(pairs));
    pair_of.resize(static_cast<size_t>(tokens * slots));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t s = 0; s < a.top_k; ++s) {
        const int32_t e = ids[t * a.top_k + s];
        int32_t pair = -1;
        if (e >= 0) {
          pair = start_[static_cast<size_t>(e)]++;
          token[static_cast<size_t>(pair)] = static_cast<int32_t>(t);
          weight[static_cast<size_t>(pair)] = weights[t * a.top_k + s];
        }
        pair_of[static_cast<size_t>(t * slots + s)] = pair;
      }
      if (shared) {
        const auto pair = static_cast<size_t>(routed + t);
        token[pair] = static_cast<int32_t>(t);
        weight[pair] = 1.0f;
        pair_of[static_cast<size_t>(t * slots + a.top_k)] = static_cast<int32_t>(pair);
      }
    }
    if (shared && tokens) groups.push_back({-1, routed, static_cast<int32_t>(tokens)});
  }

 private:
  std::vector<int32_t> start_;
};

}  // namespace mega_moe
