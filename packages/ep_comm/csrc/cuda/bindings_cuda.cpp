// The CUDA module: addresses and sizes come from Python, which has checked them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/collectives.hpp"
#include "cuda/memory.hpp"
#include "cuda/publish.hpp"
#include "kernel_core/bindings.hpp"
#include "kernel_core/cuda/status.hpp"

namespace py = pybind11;
using namespace ep_comm;
using namespace ep_comm::cuda;
using kernel_core::NoGil;
using kernel_core::pointer;
using kernel_core::cuda::as_stream;
using kernel_core::cuda::check;

namespace {

// A pointer member as a number.
template <typename T>
void bind_pointer(py::class_<RankArgs>& c, const char* name, T* RankArgs::* member) {
  c.def_property(
      name, [member](const RankArgs& a) { return reinterpret_cast<uintptr_t>(a.*member); },
      [member](RankArgs& a, uintptr_t address) { a.*member = pointer<T>(address); });
}

py::dict offsets(const Region& at) {
  py::dict d;
  d["sent_ids"] = at.sent_ids, d["x"] = at.x, d["scales"] = at.scales, d["ids"] = at.ids, d["weights"] = at.weights;
  d["sources"] = at.sources, d["records"] = at.records, d["lists"] = at.lists, d["results"] = at.results;
  d["bytes"] = at.bytes, d["ended"] = offsetof(Control, ended);
  return d;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  py::class_<Shape>(m, "Shape", py::module_local())
      .def(
          py::init([](int32_t ranks, int32_t max_tokens, int32_t hidden, int32_t top_k, int32_t experts,
                      int32_t dispatch, int32_t combine) {
            return Shape{
                ranks, max_tokens, hidden, top_k, experts, static_cast<Format>(dispatch), static_cast<Format>(combine)};
          }),
          py::arg("ranks"), py::arg("max_tokens"), py::arg("hidden"), py::arg("top_k"), py::arg("experts"),
          py::arg("dispatch"), py::arg("combine"));
  py::class_<Region>(m, "Region")
      .def(py::init(&region_of), py::arg("shape"), py::arg("fixed"), py::arg("packed"))
      .def("offsets", &offsets);

  py::class_<RankArgs> args(m, "RankArgs");
  args.def(py::init([](const Shape& shape, const Region& region, int32_t rank, uint64_t limit) {
             RankArgs a{};
             a.shape = shape, a.region = region, a.rank = rank, a.limit = limit;
             return a;
           }),
           py::arg("shape"), py::arg("region"), py::arg("rank"), py::arg("limit"))
      .def_readwrite("tokens", &RankArgs::tokens)
      .def_readwrite("x_narrow", &RankArgs::x_narrow)
      .def_readwrite("y_narrow", &RankArgs::y_narrow)
      .def_readwrite("fixed", &RankArgs::fixed)
      .def_property(
          "form", [](const RankArgs& a) { return static_cast<int32_t>(a.form); },
          [](RankArgs& a, int32_t form) { a.form = static_cast<Form>(form); });
  args.def_property(
      "peers", [](const RankArgs& a) { return reinterpret_cast<uintptr_t>(a.peers); },
      [](RankArgs& a, uintptr_t table) { a.peers = pointer<uint8_t* const>(table); });
  args.def_property(
      "report", [](const RankArgs& a) { return reinterpret_cast<uintptr_t>(a.report); },
      [](RankArgs& a, uintptr_t report) { a.report = pointer<Report>(report); });
  bind_pointer(args, "x", &RankArgs::x);
  bind_pointer(args, "ids", &RankArgs::ids);
  bind_pointer(args, "weights", &RankArgs::weights);
  bind_pointer(args, "counts", &RankArgs::counts);
  bind_pointer(args, "host_counts", &RankArgs::host_counts);
  bind_pointer(args, "rows_x", &RankArgs::rows_x);
  bind_pointer(args, "rows_scales", &RankArgs::rows_scales);
  bind_pointer(args, "rows_ids", &RankArgs::rows_ids);
  bind_pointer(args, "rows_weights", &RankArgs::rows_weights);
  bind_pointer(args, "rows_sources", &RankArgs::rows_sources);
  bind_pointer(args, "y", &RankArgs::y);
  bind_pointer(args, "out", &RankArgs::out);

  m.attr("MOST_RANKS") = kMostRanks;
  m.attr("MOST_SLOTS") = kMostSlots;
  m.attr("MOST_HERE") = kMostHere;
  m.def(
      "launch",
      [](int32_t op, const std::vector<const RankArgs*>& ranks, int ctas, uintptr_t stream) {
        std::vector<RankArgs> all;
        for (const RankArgs* a : ranks) all.push_back(*a);
        check(launch(static_cast<Op>(op), all.data(), static_cast<int>(all.size()), ctas, as_stream(stream)), "launch");
      },
      py::arg("op"), py::arg("ranks"), py::arg("ctas"), py::arg("stream"));
  m.def("load_kernels", [] {
    check(load_kernels(), "load_kernels");
    check(load_publish(), "load_kernels");
  });
  m.def(
      "publish",
      [](const RankArgs& rank, uintptr_t rows, uintptr_t weights, uintptr_t slots, uintptr_t physical,
         uintptr_t padding, int32_t logical, uintptr_t own, uintptr_t counts, uintptr_t copies, uintptr_t routed,
         uintptr_t received, int ctas, uintptr_t stream) {
        const PublishArgs args = {
            .rank = rank,
            .rows = pointer<uint16_t>(rows),
            .weights = pointer<float>(weights),
            .slots = pointer<int32_t* const>(slots),
            .physical = pointer<int32_t>(physical),
            .padding = pointer<const uint8_t>(padding),
            .copies = {logical, pointer<const int32_t>(own), pointer<const int32_t>(counts),
                       pointer<const int32_t>(copies)},
            .routed = pointer<int32_t>(routed),
            .received = pointer<int64_t>(received),
        };
        check(launch_publish(args, ctas, as_stream(stream)), "publish");
      },
      py::arg("rank"), py::arg("rows"), py::arg("weights"), py::arg("slots"), py::arg("physical"),
      py::arg("padding") = 0, py::arg("logical") = 0, py::arg("own") = 0, py::arg("counts") = 0, py::arg("copies") = 0,
      py::arg("routed") = 0, py::arg("received") = 0, py::arg("ctas"), py::arg("stream"));
  m.def(
      "allocate",
      [](int64_t bytes) {
        void* base = nullptr;
        check(allocate(bytes, &base), "allocate");
        return reinterpret_cast<uintptr_t>(base);
      },
      NoGil(), py::arg("bytes"));
  m.def("release", [](uintptr_t base) { check(release(pointer<void>(base)), "release"); }, NoGil(), py::arg("base"));
  m.def(
      "export_memory",
      [](uintptr_t base) {
        std::string handle;
        check(export_memory(pointer<void>(base), &handle), "export_memory");
        return py::bytes(handle);
      },
      py::arg("base"));
  m.def(
      "open_peer",
      [](const py::bytes& handle) {
        void* base = nullptr;
        check(open_peer(handle, &base), "open_peer");
        return reinterpret_cast<uintptr_t>(base);
      },
      py::arg("handle"));
  m.def("close_peer", [](uintptr_t base) { check(close_peer(pointer<void>(base)), "close_peer"); }, py::arg("base"));
  m.def(
      "store_word", [](uintptr_t to, uint64_t value) { check(store_word(pointer<uint64_t>(to), value), "store_word"); },
      NoGil(), py::arg("to"), py::arg("value"));
}
