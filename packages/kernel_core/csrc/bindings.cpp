#include <pybind11/pybind11.h>

#include "kernel_core/bindings.hpp"

PYBIND11_MODULE(_native, m) {
  kernel_core::bind_isa(m);
}
