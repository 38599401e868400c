// Fused experts over any product engine: gate and up products, SwiGLU, down product, sum over slots.
//
// Two passes over panels of weight rows. Pass one makes h for a panel of the intermediate width and packs it at
// once as the input of pass two. Pass two makes a panel of the model width for all experts and adds the slots of
// each token in their order, so a row's sum does not depend on how tokens were grouped.
#pragma once

#include <algorithm>
#include <vector>

#include "expert_plan.hpp"
#include "kernel_core/simd.hpp"
#include "ranges.hpp"
#include "scratch.hpp"

namespace mega_moe {
namespace KERNEL_CORE_ISA {

namespace kc = kernel_core::KERNEL_CORE_ISA;

// gate <- silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, n values
inline void swiglu(float* gate, const float* up, int64_t n, float limit, float weight) {
  using kc::F32;
  const F32 hi = F32::set(limit), lo = F32::set(-limit), w = F32::set(weight);
  for (int64_t i = 0; i < n; i += F32::width) {
    const int m = static_cast<int>(std::min<int64_t>(n - i, F32::width));
    // NaN has to survive the clamps, and min / max return their second operand where one is NaN.
    const F32 g = min(hi, F32::load_n(gate + i, m));
    const F32 u = max(lo, min(hi, F32::load_n(up + i, m)));
    (g * kc::sigmoid(g) * u * w).store_n(gate + i, m);
  }
}

template <typename Product>
class ExpertsDriver {
 public:
  explicit ExpertsDriver(const ExpertsArgs& args) : a_(args) {}

  void run() {
    const int64_t slots = a_.top_k + (a_.shared_inter > 0);
    const int64_t widest = std::max(a_.inter, a_.shared_inter);
    const int64_t per_token = slots * (Product::packed_bytes(16, a_.d) + Product::packed_bytes(16, widest));
    constexpr int64_t kBudget = 128 << 20;  // bytes of packed activations
    const int64_t chunk = std::clamp<int64_t>(kBudget / std::max<int64_t>(per_token / 16, 1), 64, 4096);
    for (int64_t first = 0; first < a_.tokens; first += chunk) run_chunk(first, std::min(chunk, a_.tokens - first));
  }

 private:
  struct Job {  // one expert in this chunk
    Matrix w13, w2;
    int64_t inter, begin, count;
    char *x, *h;  // packed inputs of the two passes
  };
  struct Item {
    int32_t job, panel;
  };

  void run_chunk(int64_t first, int64_t tokens) {
    static thread_local ExpertPlan plan;
    static thread_local Scratch packed;
    static thread_local std::vector<Job> jobs;
    static thread_local std::vector<Item> items;
    plan.build(a_, first, tokens);
    jobs.clear();
    items.clear();
    int32_t most = 0;
    for (const auto& group : plan.groups) most = std::max(most, group.count);
    hidden_rows_ = Product::panel_rows(most, a_.d);
    output_rows_ = Product::panel_rows(most, a_.inter);
    int64_t bytes = 0, cycles = 0;  // cycles: of the down products, half of those of gate and up
    for (const auto& group : plan.groups) {
      Job job = make_job(group);
      job.x = reinterpret_cast<char*>(bytes);
      bytes += Product::packed_bytes(job.count, a_.d);
      job.h = reinterpret_cast<char*>(bytes);
      bytes += Product::packed_bytes(job.count, job.inter);
      cycles += Product::cycles(a_.d, job.count, job.inter);
      for (int64_t p = 0; p * hidden_rows_ < job.inter; ++p)
        items.push_back({static_cast<int32_t>(jobs.size()), static_cast<int32_t>(p)});
      jobs.push_back(job);
    }
    char* base = packed.get<char>(bytes);
    for (Job& job : jobs) {
      job.x = base + reinterpret_cast<int64_t>(job.x);
      job.h = base + reinterpret_cast<int64_t>(job.h);
    }
    // Workers see the plan of the calling thread, not their own thread_local one.
    const ExpertPlan& p = plan;
    const Job* const job_list = jobs.data();
    const Item* const item_list = items.data();
    const int64_t experts = static_cast<int64_t>(jobs.size()), pairs = static_cast<int64_t>(plan.token.size());
    const int64_t n_items = static_cast<int64_t>(items.size()), panels = (a_.d + output_rows_ - 1) / output_rows_;
    for_ranges(experts, pairs * a_.d / 2 / std::max<int64_t>(experts, 1), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        const Job& job = job_list[j];
        Product::pack(a_.x + first * a_.d, a_.d, p.token.data() + job.begin, job.count, a_.d, job.w13.format, job.x);
      }
    });
    for_ranges(n_items, 2 * cycles / std::max<int64_t>(n_items, 1), [&](int64_t begin, int64_t end) {
      Product product;
      for (int64_t i = begin; i < end; ++i) {
        const Job& job = job_list[item_list[i].job];
        hidden_panel(product, job, item_list[i].panel, p.weight.data() + job.begin);
      }
    });
    for_ranges(panels, cycles / panels, [&](int64_t begin, int64_t end) {
      Product product;
      for (int64_t i = begin; i < end; ++i) output_panel(product, p, job_list, experts, i, first, tokens);
    });
  }

  Job make_job(const ExpertPlan::Group& group) const {
    Job job{};
    job.begin = group.begin;
    job.count = group.count;
    if (group.expert < 0) {
      job.inter = a_.shared_inter;
      job.w13 = {a_.shared_w13, a_.shared_s13, 2 * job.inter, a_.d, Format::fp8};
      job.w2 = {a_.shared_w2, a_.shared_s2, a_.d, job.inter, Format::fp8};
    } else {
      const int64_t e = group.expert;
      job.inter = a_.inter;
      job.w13 = {a_.w13 + e * job.inter * a_.d, a_.s13 + e * 2 * job.inter * (a_.d / 32), 2 * job.inter, a_.d,
                 Format::mxfp4};
      job.w2 = {a_.w2 + e * a_.d * (job.inter / 2), a_.s2 + e * a_.d * (job.inter / 32), a_.d, job.inter,
                Format::mxfp4};
    }
    return job;
  }

  void hidden_panel(Product& product, const Job& job, int64_t panel, const float* weight) const {
    static thread_local Scratch scratch;
    const int64_t row = panel * hidden_rows_, n = std::min(hidden_rows_, job.inter - row);
    float* gate = scratch.get<float>(2 * job.count * hidden_rows_ * static_cast<int64_t>(sizeof(float)));
    float* up = gate + job.count * hidden_rows_;
    product.run(job.w13, row, n, job.x, job.count, gate, hidden_rows_);
    product.run(job.w13, job.inter + row, n, job.x, job.count, up, hidden_rows_);
    for (int64_t t = 0; t < job.count; ++t)
      swiglu(gate + t * hidden_rows_, up + t * hidden_rows_, n, a_.limit, weight[t]);
    Product::pack_columns(gate, hidden_rows_, job.count, job.inter, row, n, job.w2.format, job.h);
  }

  void output_panel(Product& product, const ExpertPlan& plan, const Job* jobs, int64_t experts, int64_t panel,
                    int64_t first, int64_t tokens) const {
    using kc::F32;
    static thread_local Scratch scratch;
    const int64_t row = panel * output_rows_, n = std::min(output_rows_, a_.d - row);
    float* parts = scratch.get<float>(static_cast<int64_t>(plan.token.size()) * output_rows_ * 4);
    for (int64_t j = 0; j < experts; ++j)
      product.run(jobs[j].w2, row, n, jobs[j].h, jobs[j].count, parts + jobs[j].begin * output_rows_, output_rows_);
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t* pair = plan.pair_of.data() + t * plan.slots;
      float* y = a_.y + (first + t) * a_.d + row;
      for (int64_t i = 0; i < n; i += F32::width) {
        const int m = static_cast<int>(std::min<int64_t>(n - i, F32::width));
        F32 sum = F32::zero();
        for (int64_t s = 0; s < plan.slots; ++s)
          if (pair[s] >= 0) sum = sum + F32::load_n(parts + pair[s] * output_rows_ + i, m);
        sum.store_n(y + i, m);
      }
    }
  }

  const ExpertsArgs& a_;
  int64_t hidden_rows_ = 0, output_rows_ = 0;  // of a work item
};

}  // namespace KERNEL_CORE_ISA
}  // namespace mega_moe
