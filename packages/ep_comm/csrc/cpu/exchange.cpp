#include "cpu/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/rows.hpp"

namespace ep_comm {

void Exchange::write_tokens(const void* x, bool narrow, const int32_t* ids, const float* weights, int32_t tokens) {
  const Region& region = end_.region();
  const Record record = record_of(shape_);
  const int me = end_.rank(), k = shape_.top_k;
  const auto encode = KERNEL_CORE_PICK(encode_row);
  const int64_t row_bytes = int64_t{shape_.hidden} * (narrow ? 2 : 4);
  std::vector<int32_t> counts(shape_.ranks, 0);
  for (int32_t token = 0; token < tokens; ++token) {
    const int32_t* chosen = ids + int64_t{token} * k;
    bool sent = false;
    for (int32_t slot = 0; slot < k; ++slot) {
      const int32_t target = rank_of(shape_, chosen[slot]);
      if (target < 0 || first_slot(shape_, chosen, target) != slot) continue;
      region.list(me, target)[counts[target]++] = token;
      sent = true;
    }
    if (!sent) continue;
    uint8_t* to = region.record(me, token);
    encode(static_cast<const uint8_t*>(x) + token * row_bytes, narrow, to, to + record.scales, shape_.dispatch,
           shape_.hidden);
    std::memcpy(to + record.ids, chosen, sizeof(int32_t) * k);
    std::memcpy(to + record.weights, weights + int64_t{token} * k, sizeof(float) * k);
    std::memcpy(to + record.token, &token, sizeof token);
  }
  for (int target = 0; target < shape_.ranks; ++target)
    region.count(me, target).store(stamped_count(end_.epoch(), counts[target]), std::memory_order_relaxed);
  tokens_ = tokens;
  sent_.assign(ids, ids + int64_t{tokens} * k);
}

int32_t Exchange::count_from(int source) const {
  const uint64_t word = end_.region().count(source, end_.rank()).load(std::memory_order_relaxed);
  const uint32_t count = count_in(word);
  if (!count_is_of(word, end_.epoch()) || count > static_cast<uint32_t>(shape_.max_tokens))
    throw std::runtime_error("rank " + std::to_string(source) + " wrote a count of " + std::to_string(count) +
                             " rows that is not of epoch " + std::to_string(end_.epoch()));
  return static_cast<int32_t>(count);
}

void Exchange::counts(int32_t* counts) const {
  for (int source = 0; source < shape_.ranks; ++source) counts[source] = count_from(source);
}

void Exchange::read_tokens(const Rows& to, bool fixed) {
  const Region& region = end_.region();
  const Record record = record_of(shape_);
  const int me = end_.rank(), k = shape_.top_k;
  const int64_t channels = record.scales, scales = record.ids - record.scales;
  rows_.clear();
  local_.clear();
  int64_t row = 0;
  for (int source = 0; source < shape_.ranks; ++source) {
    const int32_t count = count_from(source);
    const int32_t* list = region.list(source, me);
    for (int32_t i = 0; i < count; ++i, ++row) {
      const int32_t token = list[i];
      if (token < 0 || token >= shape_.max_tokens)
        throw std::runtime_error("rank " + std::to_string(source) + " lists a token " + std::to_string(token));
      const uint8_t* from = region.record(source, token);
      std::memcpy(to.x + row * channels, from, channels);
      if (scales != 0) std::memcpy(to.scales + row * (scales / 4), from + record.scales, scales);
      const auto* ids = reinterpret_cast<const int32_t*>(from + record.ids);
      const auto* weights = reinterpret_cast<const float*>(from + record.weights);
      for (int32_t slot = 0; slot < k; ++slot) {
        const int32_t local = local_expert(shape_, ids[slot], me);
        to.ids[row * k + slot] = local;
        to.weights[row * k + slot] = local < 0 ? 0.0f : weights[slot];
        local_.push_back(local);
      }
      to.sources[row] = token;
      rows_.push_back({source, token, row});
    }
    if (!fixed) continue;
    // Zeros rather than what the memory held: an FP8 matrix product must not meet NaN in rows that it pads with.
    const int64_t unused = fixed_row(shape_, source + 1, 0) - row;
    std::memset(to.x + row * channels, 0, unused * channels);
    if (scales != 0) std::memset(to.scales + row * (scales / 4), 0, unused * scales);
    std::fill_n(to.ids + row * k, unused * k, -1);
    std::fill_n(to.weights + row * k, unused * k, 0.0f);
    std::fill_n(to.sources + row, unused, -1);
    row += unused;
  }
}

void Exchange::write_results(const void* y, bool narrow, bool slots) {
  const Region& region = end_.region();
  const auto round = KERNEL_CORE_PICK(round_row);
  const int k = shape_.top_k;
  const int64_t row_bytes = int64_t{shape_.hidden} * (narrow ? 2 : 4);
  const auto* from = static_cast<const uint8_t*>(y);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    for (int32_t slot = 0; slot < k; ++slot) {
      if (local_[i * k + slot] < 0) continue;
      const uint8_t* values = from + (slots ? row.row * k + slot : row.row) * row_bytes;
      round(values, narrow, region.result(row.home, result_row(shape_, row.token, slot)), shape_.combine,
            shape_.hidden);
      if (!slots) break;
    }
  }
}

void Exchange::read_results(float* out, bool slots) const {
  const Region& region = end_.region();
  const auto add = KERNEL_CORE_PICK(add_row);
  const int me = end_.rank(), k = shape_.top_k;
  std::fill_n(out, int64_t{tokens_} * shape_.hidden, 0.0f);
  std::vector<std::pair<int32_t, int32_t>> order;  // rank, slot
  for (int32_t token = 0; token < tokens_; ++token) {
    const int32_t* ids = sent_.data() + int64_t{token} * k;
    order.clear();
    for (int32_t slot = 0; slot < k; ++slot) {
      const int32_t rank = rank_of(shape_, ids[slot]);
      if (rank >= 0 && (slots || first_slot(shape_, ids, rank) == slot)) order.emplace_back(rank, slot);
    }
    if (!slots) std::sort(order.begin(), order.end());
    for (const auto& [rank, slot] : order)
      add(region.result(me, result_row(shape_, token, slot)), shape_.combine, out + int64_t{token} * shape_.hidden,
          shape_.hidden);
  }
}

void Exchange::write_gathered(const int64_t* row, int64_t n) const {
  std::memcpy(end_.region().gathered(end_.rank()), row, sizeof(int64_t) * n);
}

void Exchange::read_gathered(int64_t* rows, int64_t n) const {
  for (int rank = 0; rank < shape_.ranks; ++rank)
    std::memcpy(rows + rank * n, end_.region().gathered(rank), sizeof(int64_t) * n);
}

}  // namespace ep_comm
