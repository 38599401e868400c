// What each package's pybind11 module offers beside its ops.
#pragma once

#include <pybind11/pybind11.h>

#include "kernel_core/isa.hpp"

namespace kernel_core {

// Tensors cross the border as data pointers; shapes and dtypes are checked in Python before.
template <typename T>
inline T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Runs without the interpreter lock: kernels touch no Python object.
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

inline void bind_isa(pybind11::module_& m) {
  m.def("isa", [] { return std::string(isa_name(active_isa())); }, "instruction set in use");
  m.def("best_isa", [] { return std::string(isa_name(detect_isa())); }, "best instruction set of this CPU");
  m.def("limit_isa", &limit_isa, pybind11::arg("name"), "use at most this level; 'best' undoes it");
}

}  // namespace kernel_core
