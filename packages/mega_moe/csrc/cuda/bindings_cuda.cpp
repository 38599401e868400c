// The CUDA module: device pointers, sizes and a stream as integers. Nothing here waits for the device.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_experts(py::module_& m);
void bind_experts_sm100(py::module_& m);
void bind_linear(py::module_& m);
void bind_prefill(py::module_& m);
void bind_route(py::module_& m);

PYBIND11_MODULE(_cuda, m) {
#if defined(MEGA_MOE_CUDA_EXPERTS)
  bind_experts(m);
#endif
#if defined(MEGA_MOE_CUDA_EXPERTS_SM100)
  bind_experts_sm100(m);
#endif
#if defined(MEGA_MOE_CUDA_LINEAR)
  bind_linear(m);
#endif
#if defined(MEGA_MOE_CUDA_PREFILL)
  bind_prefill(m);
#endif
#if defined(MEGA_MOE_CUDA_ROUTE)
  bind_route(m);
#endif
}
