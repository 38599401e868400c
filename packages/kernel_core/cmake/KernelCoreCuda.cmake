# CUDA modules of kernel packages. Included by KernelCore; a build without CUDA sees nothing of it.
#
#   FATHOM_CUDA=AUTO|ON|OFF                 AUTO: where nvcc and an NVIDIA device (or nvidia-smi) are there
#   kernel_core_add_cuda_module(_cuda
#     SOURCES csrc/cuda/sm90/score.cu          # machine code for 90a; sources named *_sm100.cu for 100a instead
#             csrc/cuda/bindings_cuda.cpp      # the host compiler's; files that are missing are an error
#     COMMON  csrc/cuda/sm90/rows.cu)          # for 90a and for 100a: nothing in it is special to either
#
# COMMON wins over SOURCES. ci/compile_gate reads it too, so its files stand there as they are, without variables.
#
# A module links cudart_static and never libcuda: it loads on a machine without a driver and fails only when called.

include_guard(GLOBAL)
set(FATHOM_CUDA AUTO CACHE STRING "Build CUDA kernels: AUTO, ON or OFF")
set_property(CACHE FATHOM_CUDA PROPERTY STRINGS AUTO ON OFF)

set(_kernel_core_cuda OFF)
if(FATHOM_CUDA STREQUAL "AUTO")
  find_program(KERNEL_CORE_NVIDIA_SMI nvidia-smi)
  if(KERNEL_CORE_NVIDIA_SMI OR EXISTS "/dev/nvidiactl" OR EXISTS "/dev/nvidia0")
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(_kernel_core_cuda ON)
    else()
      message(STATUS "FATHOM_CUDA: an NVIDIA device but no nvcc; CUDA kernels are left out")
    endif()
  endif()
elseif(FATHOM_CUDA)
  set(_kernel_core_cuda ON)
endif()

# enable_language belongs to file scope. Code for two real architectures only: other GPUs have other kernels.
if(_kernel_core_cuda)
  set(CMAKE_CUDA_ARCHITECTURES "90a-real;100a-real")
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(KERNEL_CORE_CUDA ON CACHE INTERNAL "CUDA kernels are built")
else()
  set(KERNEL_CORE_CUDA OFF CACHE INTERNAL "CUDA kernels are built")
endif()

# CMake 3.25 does not know how nvcc 13 is asked for C++20.
foreach(kind STANDARD EXTENSION)
  if(KERNEL_CORE_CUDA AND NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION "-std=c++20")
  endif()
endforeach()
set(KERNEL_CORE_CUDA_FLAGS --expt-relaxed-constexpr -O3 -lineinfo)

function(_kernel_core_cuda_library module part archs)
  set(lib "${module}_${part}")
  add_library(${lib} OBJECT ${ARGN})
  set_target_properties(${lib} PROPERTIES CUDA_ARCHITECTURES "${archs}" CUDA_STANDARD 20 CUDA_EXTENSIONS OFF
                        CUDA_STANDARD_REQUIRED ON POSITION_INDEPENDENT_CODE ON
                        CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(${lib} PRIVATE ${KERNEL_CORE_CUDA_FLAGS})
  target_include_directories(${lib} PRIVATE "${KERNEL_CORE_ROOT}/include" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  target_link_libraries(${module} PRIVATE ${lib})
endfunction()

function(kernel_core_add_cuda_module name)
  cmake_parse_arguments(ARG "" "PACKAGE" "SOURCES;COMMON" ${ARGN})
  if(NOT KERNEL_CORE_CUDA)
    return()
  endif()
  if(NOT ARG_PACKAGE)
    set(ARG_PACKAGE "${PROJECT_NAME}")
  endif()
  set(target "${ARG_PACKAGE}${name}")
  list(REMOVE_ITEM ARG_SOURCES ${ARG_COMMON})
  set(hosts ${ARG_SOURCES})
  list(FILTER hosts EXCLUDE REGEX "\\.cu$")
  set(sm100 ${ARG_SOURCES})
  list(FILTER sm100 INCLUDE REGEX "_sm100\\.cu$")
  set(sm90 ${ARG_SOURCES})
  list(FILTER sm90 INCLUDE REGEX "\\.cu$")
  list(FILTER sm90 EXCLUDE REGEX "_sm100\\.cu$")

  pybind11_add_module(${target} MODULE NO_EXTRAS ${hosts})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME "${name}" CXX_VISIBILITY_PRESET hidden LINKER_LANGUAGE CXX)
  target_compile_options(${target} PRIVATE ${KERNEL_CORE_FLAGS})
  target_include_directories(${target} PRIVATE "${KERNEL_CORE_ROOT}/include" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  if(sm90)
    _kernel_core_cuda_library(${target} sm90 90a-real ${sm90})
  endif()
  if(sm100)
    _kernel_core_cuda_library(${target} sm100 100a-real ${sm100})
  endif()
  if(ARG_COMMON)
    _kernel_core_cuda_library(${target} common "90a-real;100a-real" ${ARG_COMMON})
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION "${ARG_PACKAGE}")
endfunction()
