// The CPU module: one rank's end of shared memory. Python checks arguments, drives the waits and raises the errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <system_error>

#include "cpu/exchange.hpp"
#include "cpu/mover.hpp"
#include "kernel_core/bindings.hpp"

namespace py = pybind11;
using kernel_core::NoGil;
using kernel_core::pointer;

namespace ep_comm {
namespace {

struct End {
  End(std::shared_ptr<Memory> memory, const Shape& shape, int rank)
      : endpoint(std::move(memory), shape, rank), exchange(endpoint), mover(endpoint) {}
  Endpoint endpoint;
  Exchange exchange;
  Mover mover;
};

void bind_shape(py::module_& m) {
  py::class_<Shape>(m, "Shape", py::module_local())
      .def(py::init([](int ranks, int max_tokens, int hidden, int top_k, int experts, int dispatch, int combine) {
        return Shape{
            ranks, max_tokens, hidden, top_k, experts, static_cast<Format>(dispatch), static_cast<Format>(combine)};
      }));
}

// The offsets of layout.hpp, for tests of what Python says of them.
py::tuple record_offsets(const Shape& shape) {
  const Record at = record_of(shape);
  return py::make_tuple(at.scales, at.ids, at.weights, at.token, at.bytes);
}

void bind_memory(py::module_& m) {
  py::class_<Memory, std::shared_ptr<Memory>>(m, "Memory").def("is_file", &Memory::is_file);
  m.def("private_memory", &private_memory, NoGil());
  // Memory, or what differs where peers have another shape.
  m.def("file_memory", [](const std::string& path, const Shape& shape) -> py::object {
    try {
      std::shared_ptr<Memory> memory;
      {
        const py::gil_scoped_release free;
        memory = file_memory(path, shape);
      }
      return py::cast(memory);
    } catch (const std::domain_error& error) {
      return py::str(error.what());
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
      throw py::error_already_set();
    }
  });
}

void bind_waits(py::class_<End>& end) {
  end.def(
         "claim", [](End& e) { return e.endpoint.claim(); }, NoGil())
      .def(
          "enter", [](End& e, double timeout) { e.endpoint.enter(timeout); }, NoGil())
      .def(
          "wait_joined", [](End& e, double slice) { return e.endpoint.wait_joined(slice); }, NoGil())
      .def(
          "begin",
          [](End& e, int kind, uint32_t detail, double timeout) {
            e.endpoint.begin(static_cast<Kind>(kind), detail, timeout);
            return e.endpoint.epoch();
          },
          NoGil())
      .def(
          "wait_free",
          [](End& e, int buffer, double slice) { return e.endpoint.wait_free(static_cast<Buffer>(buffer), slice); },
          NoGil())
      .def(
          "post", [](End& e) { e.endpoint.post(); }, NoGil())
      .def(
          "wait_posted", [](End& e, double slice) { return e.endpoint.wait_posted(slice); }, NoGil())
      .def(
          "finish", [](End& e) { e.endpoint.finish(); }, NoGil())
      .def(
          "abort", [](End& e, const std::string& reason) { e.endpoint.abort(reason); }, NoGil())
      .def(
          "close",
          [](End& e) {
            e.mover.stop();
            e.endpoint.close();
          },
          NoGil())
      .def("own_end", [](const End& e) { return e.endpoint.own_end(); });
}

void bind_exchange(py::class_<End>& end) {
  end.def(
         "write_tokens",
         [](End& e, uintptr_t x, bool narrow, uintptr_t ids, uintptr_t weights, int32_t tokens) {
           e.exchange.write_tokens(pointer<void>(x), narrow, pointer<int32_t>(ids), pointer<float>(weights), tokens);
         },
         NoGil())
      .def(
          "counts", [](End& e, uintptr_t counts) { e.exchange.counts(pointer<int32_t>(counts)); }, NoGil())
      .def(
          "read_tokens",
          [](End& e, uintptr_t x, uintptr_t scales, uintptr_t ids, uintptr_t weights, uintptr_t sources, bool fixed) {
            e.exchange.read_tokens({pointer<uint8_t>(x), pointer<float>(scales), pointer<int32_t>(ids),
                                    pointer<float>(weights), pointer<int32_t>(sources)},
                                   fixed);
          },
          NoGil())
      .def(
          "write_results",
          [](End& e, uintptr_t y, bool narrow, bool slots) {
            e.exchange.write_results(pointer<void>(y), narrow, slots);
          },
          NoGil())
      .def(
          "read_results",
          [](End& e, uintptr_t out, bool slots) { e.exchange.read_results(pointer<float>(out), slots); }, NoGil())
      .def(
          "write_gathered",
          [](End& e, uintptr_t row, int64_t n) { e.exchange.write_gathered(pointer<int64_t>(row), n); }, NoGil())
      .def(
          "read_gathered",
          [](End& e, uintptr_t rows, int64_t n) { e.exchange.read_gathered(pointer<int64_t>(rows), n); }, NoGil());
}

void bind_moves(py::class_<End>& end) {
  end.def(
         "start_transfer",
         [](End& e, int64_t tag, int source, int target, uintptr_t data, int64_t bytes) {
           return e.mover.start(tag, source, target, pointer<uint8_t>(data), bytes);
         },
         NoGil())
      .def(
          "transfer_state", [](End& e, uint64_t number) { return e.mover.state(number); }, NoGil())
      .def(
          "wait_transfer", [](End& e, uint64_t number, double slice) { e.mover.wait(number, slice); }, NoGil())
      .def("forget_transfer", [](End& e, uint64_t number) { e.mover.forget(number); }, NoGil());
}

}  // namespace
}  // namespace ep_comm

PYBIND11_MODULE(_native, m) {
  using namespace ep_comm;
  kernel_core::bind_isa(m);
  bind_shape(m);
  m.def("record_offsets", &record_offsets);
  bind_memory(m);
  py::class_<Verdict>(m, "Verdict")
      .def_property_readonly("code", [](const Verdict& v) { return static_cast<int>(v.code); })
      .def_readonly("ranks", &Verdict::ranks)
      .def_readonly("text", &Verdict::text);
  py::class_<End> end(m, "End");
  end.def(py::init<std::shared_ptr<Memory>, const Shape&, int>());
  bind_waits(end);
  bind_exchange(end);
  bind_moves(end);
}
