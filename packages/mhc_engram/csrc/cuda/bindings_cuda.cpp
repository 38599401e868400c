// The CUDA module: device pointers, sizes and a stream as integers. Nothing here waits for the device.
#include <pybind11/pybind11.h>

#include "cuda/engram.hpp"
#include "cuda/hyper_connection.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;
using namespace mhc_engram::cuda;

PYBIND11_MODULE(_cuda, m) {
  m.def(
      "hc_shape",
      [](int64_t tokens, int64_t channels, int64_t multiprocessors) {
        const HcShape shape = hc_shape(tokens, channels, multiprocessors);
        return std::tuple<int, int, int, int>(shape.cluster, shape.tile, shape.warps, shape.stay);
      },
      py::arg("tokens"), py::arg("channels"), py::arg("multiprocessors"));
  m.def(
      "hc_step",
      [](int64_t tokens, int64_t channels, uintptr_t streams, uintptr_t y, uintptr_t post, uintptr_t comb, uintptr_t fn,
         uintptr_t base, uintptr_t scale, uintptr_t pre_out, uintptr_t post_out, uintptr_t comb_out, uintptr_t pre_mix,
         uintptr_t norm_weight, uintptr_t mixed, uintptr_t codes, uintptr_t code_scales, float norm_eps, float hc_eps,
         float eps, int iters, int cluster, int tile, int warps, int stay, uintptr_t stream) {
        const HcParams p = {.tokens = tokens,
                            .channels = channels,
                            .streams = pointer<float>(streams),
                            .y = pointer<const float>(y),
                            .post = pointer<const float>(post),
                            .comb = pointer<const float>(comb),
                            .fn = pointer<const float>(fn),
                            .base = pointer<const float>(base),
                            .scale = pointer<const float>(scale),
                            .pre_out = pointer<float>(pre_out),
                            .post_out = pointer<float>(post_out),
                            .comb_out = pointer<float>(comb_out),
                            .pre_mix = pointer<const float>(pre_mix),
                            .norm_weight = pointer<const float>(norm_weight),
                            .mixed = pointer<float>(mixed),
                            .codes = pointer<uint8_t>(codes),
                            .code_scales = pointer<uint8_t>(code_scales),
                            .norm_eps = norm_eps,
                            .hc_eps = hc_eps,
                            .eps = eps,
                            .iters = iters};
        check(hc_step(p, {cluster, tile, warps, stay}, as_stream(stream)), "hc_step");
      },
      NoGil(), py::arg("tokens"), py::arg("channels"), py::arg("streams"), py::arg("y") = 0, py::arg("post") = 0,
      py::arg("comb") = 0, py::arg("fn") = 0, py::arg("base") = 0, py::arg("scale") = 0, py::arg("pre_out") = 0,
      py::arg("post_out") = 0, py::arg("comb_out") = 0, py::arg("pre_mix") = 0, py::arg("norm_weight") = 0,
      py::arg("mixed") = 0, py::arg("codes") = 0, py::arg("code_scales") = 0, py::arg("norm_eps") = 0.0f,
      py::arg("hc_eps") = 0.0f, py::arg("eps") = 0.0f, py::arg("iters") = 1, py::arg("cluster"), py::arg("tile"),
      py::arg("warps"), py::arg("stay") = 0, py::arg("stream"));
  m.def(
      "engram_rows",
      [](int64_t tokens, int64_t requests, int64_t orders, int64_t heads, uintptr_t mapped, uintptr_t dead,
         uintptr_t history, uintptr_t cu_seqlens, uintptr_t multipliers, uintptr_t primes, uintptr_t offsets,
         int64_t pad_mapped, uintptr_t rows, uintptr_t stream) {
        check(
            engram_rows({tokens, requests, orders, heads, pointer<const int64_t>(mapped), pointer<const uint8_t>(dead),
                         pointer<const int64_t>(history), pointer<const int32_t>(cu_seqlens),
                         pointer<const int64_t>(multipliers), pointer<const int64_t>(primes),
                         pointer<const int64_t>(offsets), pad_mapped, pointer<int64_t>(rows)},
                        as_stream(stream)),
            "engram_rows");
      },
      NoGil(), py::arg("tokens"), py::arg("requests"), py::arg("orders"), py::arg("heads"), py::arg("mapped"),
      py::arg("dead"), py::arg("history"), py::arg("cu_seqlens"), py::arg("multipliers"), py::arg("primes"),
      py::arg("offsets"), py::arg("pad_mapped"), py::arg("rows"), py::arg("stream"));
  m.def(
      "engram_gather",
      [](int64_t count, int64_t dim, int64_t table_rows, uintptr_t table, uintptr_t scale, uintptr_t rows,
         uintptr_t out, int64_t blocks, uintptr_t stream) {
        check(engram_gather({count, dim, table_rows, pointer<const uint8_t>(table), pointer<const uint8_t>(scale),
                             pointer<const int64_t>(rows), pointer<float>(out)},
                            blocks, as_stream(stream)),
              "engram_gather");
      },
      NoGil(), py::arg("count"), py::arg("dim"), py::arg("table_rows"), py::arg("table"), py::arg("scale"),
      py::arg("rows"), py::arg("out"), py::arg("blocks"), py::arg("stream"));
  m.def(
      "engram_inject",
      [](int64_t tokens, int64_t streams, int64_t channels, uintptr_t x, uintptr_t kv, uintptr_t qk_weight,
         uintptr_t dead, float eps, uintptr_t stream) {
        check(engram_inject({tokens, streams, channels, pointer<float>(x), pointer<const float>(kv),
                             pointer<const float>(qk_weight), pointer<const uint8_t>(dead), eps},
                            as_stream(stream)),
              "engram_inject");
      },
      NoGil(), py::arg("tokens"), py::arg("streams"), py::arg("channels"), py::arg("x"), py::arg("kv"),
      py::arg("qk_weight"), py::arg("dead"), py::arg("eps"), py::arg("stream"));
}
