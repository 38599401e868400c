// Launches of the experts for many tokens.
#include "expert_prefill_kernel.cuh"

namespace mega_moe::sm90 {
namespace {

// `follows`: the launch may begin while the one before it ends; the kernel waits for what that has written.
template <typename Kernel, typename... Arguments>
cudaError_t launch(Kernel kernel, int ctas, int threads, size_t bytes, bool follows, cudaStream_t stream,
                   Arguments... arguments) {
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)))
    return e;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas)), config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = follows ? 1 : 0;
  if (cudaError_t e = cudaLaunchKernelEx(&config, kernel, arguments...)) return e;
  return cudaGetLastError();
}

template <typename C>
cudaError_t products(const PrefillParams& p, int ctas, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(PrefillShared<C>);
  static_assert(kBytes <= 232448, "more shared memory than a CTA can have");
  if (p.steps & kPrefillFirst) {
    const bool follows = p.steps & kPrefillRows;
    if (cudaError_t e = launch(prefill_product_kernel<C, true>, ctas, C::kThreads, kBytes, follows, stream, p))
      return e;
  }
  if (p.steps & kPrefillSecond) {
    const bool follows = p.steps & kPrefillFirst;
    if (cudaError_t e = launch(prefill_product_kernel<C, false>, ctas, C::kThreads, kBytes, follows, stream, p))
      return e;
  }
  return cudaSuccess;
}

template <PrefillKind kKind>
cudaError_t products(const PrefillParams& p, int tile, int ctas, cudaStream_t stream) {
  return tile == 64 ? products<PrefillConfig<64, 3, kKind>>(p, ctas, stream)
                    : products<PrefillConfig<128, 4, kKind>>(p, ctas, stream);
}

bool aligned(const void* p, uint64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

bool fits(const PrefillParams& p, int tile, int ctas) {
  const bool sizes = p.tokens >= 0 && p.slots > 0 && p.experts > 0 && p.experts <= kPrefillExperts && p.d > 0 &&
                     p.inter > 0 && p.d % 256 == 0 && p.inter % 256 == 0 && ctas > 0 && p.limit > 0 &&
                     (tile == 64 || tile == 128) && p.lag >= 0 && p.lag < (tile == 64 ? 3 : 4) && p.d <= (1 << 16) &&
                     p.inter <= (1 << 15);
  const bool given = p.tokens == 0 || (p.ids && p.weights && p.x && p.out && p.offsets && p.rows && p.w13 && p.w2 &&
                                       p.images && p.hidden && p.parts);
  const bool expanded =
      (p.expanded13 == nullptr) == (p.expanded2 == nullptr) && (p.expanded13 != nullptr || !(p.steps & kPrefillExpand));
  const bool scaled = (p.scale13 == nullptr) == (p.scale2 == nullptr) && (p.scale13 || !p.expanded13);
  const bool direct = p.parts != p.out || (p.slots == 1 && p.parts_are_float == p.out_is_float);
  const int64_t rows = static_cast<int64_t>(p.tokens) * p.slots;
  // numbers of tiles, and the position of a step in a weight's tile, are 32-bit
  const bool counts = sizes && (rows / 64 + p.experts) * (2 * int64_t{p.inter} + p.d) / 256 < (int64_t{1} << 30);
  return counts && given && expanded && scaled && direct && aligned(p.x, 16) && aligned(p.out, 16) &&
         aligned(p.w13, 16) && aligned(p.w2, 16) && aligned(p.scale13, 8) && aligned(p.scale2, 8) &&
         aligned(p.images, 128) && aligned(p.hidden, 128) && aligned(p.parts, 16) && aligned(p.expanded13, 128) &&
         aligned(p.expanded2, 128);
}

}  // namespace

PrefillSizes prefill_sizes(int64_t tokens, int64_t slots, int64_t d, int64_t inter, int64_t experts, bool fp8,
                           bool parts_are_float) {
  const int64_t blocks = most_blocks(tokens, slots, experts);
  return {chunks_bytes(blocks, d, fp8), chunks_bytes(blocks, inter, fp8),
          tokens * slots * d * (parts_are_float ? 4 : 2), experts * 2 * inter * d, experts * d * inter};
}

cudaError_t prefill(const PrefillParams& p, int tile, int ctas, cudaStream_t stream) {
  if (!fits(p, tile, ctas)) return cudaErrorInvalidValue;
  if (p.tokens == 0) return cudaSuccess;
  constexpr int kRowCtas = 8;  // a multiprocessor's
  const bool fp8 = p.scale13 != nullptr;
  if (p.steps & kPrefillExpand) {
    const int64_t steps13 = int64_t{p.experts} * (2 * p.inter / kBlockRows) * (p.d / kFp8Group);
    const int64_t steps2 = int64_t{p.experts} * (p.d / kBlockRows) * (p.inter / kFp8Group);
    if (cudaError_t e = launch(prefill_expand_kernel, ctas * 16, 128, 0, false, stream, p.w13, p.expanded13, steps13))
      return e;
    if (cudaError_t e = launch(prefill_expand_kernel, ctas * 16, 128, 0, false, stream, p.w2, p.expanded2, steps2))
      return e;
  }
  if (p.steps & kPrefillRows) {
    if (cudaError_t e = launch(fp8 ? prefill_rows_kernel<true> : prefill_rows_kernel<false>, ctas * kRowCtas,
                               kRowThreads, sizeof(PrefillPlan), false, stream, p))
      return e;
  }
  const cudaError_t e = p.expanded13 ? products<PrefillKind::expanded>(p, tile, ctas, stream)
                        : fp8        ? products<PrefillKind::fp8>(p, tile, ctas, stream)
                                     : products<PrefillKind::bf16>(p, tile, ctas, stream);
  if (e) return e;
  if (!(p.steps & kPrefillSum)) return cudaSuccess;
  return launch(prefill_sum_kernel, ctas * kRowCtas, kRowThreads, 0, (p.steps & kPrefillSecond) != 0, stream, p);
}

}  // namespace mega_moe::sm90
