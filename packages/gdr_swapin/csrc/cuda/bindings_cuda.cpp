// The CUDA module: addresses, sizes and a stream as integers. Nothing here waits for the device.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "cuda/copies.hpp"
#include "cuda/host_memory.hpp"
#include "cuda/move_slices.hpp"
#include "cuda/stage.hpp"
#include "cuda/stream_wait.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;
using namespace gdr_swapin::cuda;

namespace {

Pieces pieces_at(uintptr_t targets, uintptr_t sources, uintptr_t sizes, int64_t count) {
  return {pointer<const uint64_t>(targets), pointer<const uint64_t>(sources), pointer<const uint64_t>(sizes), count};
}

// `layers`: an array of five 64-bit numbers a layer: offset, index bytes, main bytes, index pool, main pool.
MoveParams move_params(uintptr_t source, int64_t stride, uintptr_t slots, uintptr_t blocks, int64_t count,
                       int64_t piece, uintptr_t layers, int layer_count) {
  if (layer_count < 1 || layer_count > MoveParams::most_layers) throw std::invalid_argument("move: layer_count");
  if (piece < 16 || piece > INT32_MAX) throw std::invalid_argument("move: piece");
  MoveParams p = {.source = pointer<const uint8_t>(source),
                  .source_stride = stride,
                  .slots = pointer<const int32_t>(slots),
                  .blocks = pointer<const int32_t>(blocks),
                  .count = count,
                  .piece = static_cast<uint32_t>(piece),
                  .layers = layer_count,
                  .layer = {}};
  const auto* table = pointer<const uint64_t>(layers);
  for (int l = 0; l < layer_count; ++l, table += 5) {
    if (table[1] > INT32_MAX || table[2] > INT32_MAX) throw std::invalid_argument("move: page bytes");
    p.layer[l] = {static_cast<int64_t>(table[0]), static_cast<uint32_t>(table[1]), static_cast<uint32_t>(table[2]),
                  pointer<uint8_t>(table[3]), pointer<uint8_t>(table[4])};
  }
  return p;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.def("has_batch", &has_batch, NoGil());
  m.def(
      "copy_batch",
      [](uintptr_t targets, uintptr_t sources, uintptr_t sizes, int64_t count, int64_t per_call, bool any_order,
         bool prefer_overlap, uintptr_t stream) {
        int64_t queued = 0;
        check(copy_batch(pieces_at(targets, sources, sizes, count), per_call, any_order, prefer_overlap,
                         as_stream(stream), &queued),
              "copy_batch");
        return queued;
      },
      NoGil(), py::arg("targets"), py::arg("sources"), py::arg("sizes"), py::arg("count"), py::arg("per_call"),
      py::arg("any_order"), py::arg("prefer_overlap"), py::arg("stream"));
  m.def(
      "copy_each",
      [](uintptr_t targets, uintptr_t sources, uintptr_t sizes, int64_t count, uintptr_t stream) {
        int64_t queued = 0;
        check(copy_each(pieces_at(targets, sources, sizes, count), as_stream(stream), &queued), "copy_each");
        return queued;
      },
      NoGil(), py::arg("targets"), py::arg("sources"), py::arg("sizes"), py::arg("count"), py::arg("stream"));
  m.def(
      "copy_strided",
      [](uintptr_t targets, uintptr_t target_pitches, uintptr_t sources, uintptr_t source_pitches, uintptr_t widths,
         uintptr_t rows, int64_t count, int64_t per_call, bool any_order, bool prefer_overlap, uintptr_t stream) {
        const StridedPieces pieces = {pointer<const uint64_t>(targets),
                                      pointer<const uint64_t>(target_pitches),
                                      pointer<const uint64_t>(sources),
                                      pointer<const uint64_t>(source_pitches),
                                      pointer<const uint64_t>(widths),
                                      pointer<const uint64_t>(rows),
                                      count};
        int64_t queued = 0;
        check(copy_strided(pieces, per_call, any_order, prefer_overlap, as_stream(stream), &queued), "copy_strided");
        return queued;
      },
      NoGil(), py::arg("targets"), py::arg("target_pitches"), py::arg("sources"), py::arg("source_pitches"),
      py::arg("widths"), py::arg("rows"), py::arg("count"), py::arg("per_call"), py::arg("any_order"),
      py::arg("prefer_overlap"), py::arg("stream"));
  m.def(
      "copy_rows",
      [](uintptr_t to, uint64_t to_pitch, uintptr_t from, uint64_t from_pitch, uint64_t width, uint64_t rows,
         uintptr_t stream) {
        check(copy_rows(pointer<void>(to), to_pitch, pointer<const void>(from), from_pitch, width, rows,
                        as_stream(stream)),
              "copy_rows");
      },
      NoGil(), py::arg("to"), py::arg("to_pitch"), py::arg("from_"), py::arg("from_pitch"), py::arg("width"),
      py::arg("rows"), py::arg("stream"));
  m.def(
      "move_bulk",
      [](uintptr_t source, int64_t stride, uintptr_t slots, uintptr_t blocks, int64_t count, int64_t piece,
         uintptr_t layers, int layer_count, uint32_t group_ends, uintptr_t done, bool stream_once, int ctas, int stages,
         uintptr_t stream) {
        MoveParams p = move_params(source, stride, slots, blocks, count, piece, layers, layer_count);
        p.group_ends = group_ends, p.done = pointer<uint32_t>(done), p.stream_once = stream_once;
        check(move_bulk(p, ctas, stages, as_stream(stream)), "move_bulk");
      },
      NoGil(), py::arg("source"), py::arg("stride"), py::arg("slots"), py::arg("blocks"), py::arg("count"),
      py::arg("piece"), py::arg("layers"), py::arg("layer_count"), py::arg("group_ends"), py::arg("done"),
      py::arg("stream_once"), py::arg("ctas"), py::arg("stages"), py::arg("stream"));
  m.def("has_wait_value", &has_wait_value, NoGil());
  m.def(
      "wait_value",
      [](uintptr_t counter, uint32_t value, uintptr_t stream) {
        check(wait_value(pointer<uint32_t>(counter), value, as_stream(stream)), "wait_value");
      },
      NoGil(), py::arg("counter"), py::arg("value"), py::arg("stream"));
  m.def(
      "move_plain",
      [](uintptr_t source, int64_t stride, uintptr_t slots, uintptr_t blocks, int64_t count, int64_t piece,
         uintptr_t layers, int layer_count, int ctas, int loads, uintptr_t stream) {
        check(move_plain(move_params(source, stride, slots, blocks, count, piece, layers, layer_count), ctas, loads,
                         as_stream(stream)),
              "move_plain");
      },
      NoGil(), py::arg("source"), py::arg("stride"), py::arg("slots"), py::arg("blocks"), py::arg("count"),
      py::arg("piece"), py::arg("layers"), py::arg("layer_count"), py::arg("ctas"), py::arg("loads"),
      py::arg("stream"));
  // Arrays of handles: `streams` of `stream_count` streams, `filled` and `emptied` of `parts` events. Answers with the
  // number of rounds, by which the caller advances `part` and `turn`.
  m.def(
      "stage",
      [](uintptr_t source, uint64_t stride, uintptr_t slots, int64_t count, uint64_t offset, uint64_t size,
         uint64_t area, uint64_t part_bytes, int64_t parts, int64_t part, int64_t first, int64_t per_call,
         int64_t regular_from, bool batched, bool any_order, bool prefer_overlap, uintptr_t streams,
         int64_t stream_count, int64_t turn, uintptr_t join, uintptr_t filled, uintptr_t emptied, uintptr_t ids,
         uintptr_t layers, int layer_count, int64_t piece, int ctas, int loads, int stages) {
        const StagePlan plan = {source,       stride,       pointer<const int64_t>(slots),
                                count,        offset,       size,
                                area,         part_bytes,   parts,
                                part,         first,        per_call,
                                regular_from, stream_count, turn};
        const StageQueue queue = {pointer<const cudaStream_t>(streams),
                                  as_stream(join),
                                  pointer<const cudaEvent_t>(filled),
                                  pointer<const cudaEvent_t>(emptied),
                                  batched,
                                  any_order,
                                  prefer_overlap,
                                  move_params(area, static_cast<int64_t>(size), 0, ids, 0, piece, layers, layer_count),
                                  ctas,
                                  loads,
                                  stages};
        int64_t rounds = 0;
        check(stage(plan, queue, &rounds), "stage");
        return rounds;
      },
      NoGil(), py::arg("source"), py::arg("stride"), py::arg("slots"), py::arg("count"), py::arg("offset"),
      py::arg("size"), py::arg("area"), py::arg("part_bytes"), py::arg("parts"), py::arg("part"), py::arg("first"),
      py::arg("per_call"), py::arg("regular_from"), py::arg("batched"), py::arg("any_order"), py::arg("prefer_overlap"),
      py::arg("streams"), py::arg("stream_count"), py::arg("turn"), py::arg("join"), py::arg("filled"),
      py::arg("emptied"), py::arg("ids"), py::arg("layers"), py::arg("layer_count"), py::arg("piece"), py::arg("ctas"),
      py::arg("loads"), py::arg("stages"));
  m.def(
      "make_events",
      [](uintptr_t events, int64_t count) { check(make_events(pointer<uint64_t>(events), count), "make_events"); },
      NoGil(), py::arg("events"), py::arg("count"));
  m.def(
      "free_events",
      [](uintptr_t events, int64_t count) {
        check(free_events(pointer<const uint64_t>(events), count), "free_events");
      },
      NoGil(), py::arg("events"), py::arg("count"));
  m.def(
      "record_events",
      [](uintptr_t events, int64_t count, uintptr_t stream) {
        const auto* handles = pointer<const uint64_t>(events);
        for (int64_t i = 0; i < count; ++i)
          check(cudaEventRecord(reinterpret_cast<cudaEvent_t>(handles[i]), as_stream(stream)), "record_events");
      },
      NoGil(), py::arg("events"), py::arg("count"), py::arg("stream"));
  m.def(
      "upload_ids",
      [](uintptr_t pinned, uintptr_t device, uintptr_t slots, uintptr_t blocks, int64_t count, uintptr_t stream) {
        check(upload_ids(pointer<int32_t>(pinned), pointer<int32_t>(device), pointer<const int64_t>(slots),
                         pointer<const int64_t>(blocks), count, as_stream(stream)),
              "upload_ids");
      },
      NoGil(), py::arg("pinned"), py::arg("device"), py::arg("slots"), py::arg("blocks"), py::arg("count"),
      py::arg("stream"));
  m.def(
      "register_host",
      [](uintptr_t at, uint64_t bytes) { check(register_host(pointer<void>(at), bytes), "register_host"); }, NoGil(),
      py::arg("at"), py::arg("bytes"));
  m.def(
      "unregister_host", [](uintptr_t at) { check(unregister_host(pointer<void>(at)), "unregister_host"); }, NoGil(),
      py::arg("at"));
  m.def(
      "device_address",
      [](uintptr_t at) {
        uint64_t address = 0;
        check(device_address(pointer<void>(at), &address), "device_address");
        return address;
      },
      NoGil(), py::arg("at"));
}
