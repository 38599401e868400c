// Each file of bindings adds its ops to the one module.
#pragma once

#include <pybind11/pybind11.h>

#include "kernel_core/bindings.hpp"

void bind_norm(pybind11::module_& m);
void bind_rows(pybind11::module_& m);
void bind_compressor(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_indexer(pybind11::module_& m);
