# What every kernel package builds with: one pybind11 module whose hot sources are compiled once for each
# instruction set, each in its own namespace, and chosen at run time.
#
#   include(KernelCore)                     # found through kernel_core_DIR or ../kernel_core/cmake
#   kernel_core_add_module(_native
#     BINDINGS csrc/bindings.cpp            # compiled once, baseline instruction set
#     KERNELS  csrc/cpu/attention.cpp       # compiled for scalar, avx2, avx512
#     AMX      csrc/cpu/experts_amx.cpp)    # compiled once with AMX-BF16 on top of AVX-512

include_guard(GLOBAL)
get_filename_component(KERNEL_CORE_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT pybind11_DIR)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
                  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
find_package(pybind11 CONFIG REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)

# No -ffast-math anywhere: references are matched to the bit, NaN has to travel, and sums keep their order.
# -ffp-contract=off leaves a fused multiply-add only where the source asks for one.
set(KERNEL_CORE_FLAGS -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra
                      -Wno-unused-function -Wno-psabi -Wno-ignored-attributes)
set(KERNEL_CORE_ISAS scalar)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  list(APPEND KERNEL_CORE_ISAS avx2 avx512)
  set(KERNEL_CORE_HAS_AMX ON)
endif()
set(KERNEL_CORE_FLAGS_scalar "")
set(KERNEL_CORE_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(KERNEL_CORE_FLAGS_avx512 ${KERNEL_CORE_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq
                             -mprefer-vector-width=512)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns inside its own AVX-512 headers (GCC bug 105593); the other levels compile the same sources.
  list(APPEND KERNEL_CORE_FLAGS_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(KERNEL_CORE_FLAGS_amx ${KERNEL_CORE_FLAGS_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)

function(_kernel_core_isa_library module isa)
  set(lib "${module}_${isa}")
  add_library(${lib} OBJECT ${ARGN})
  target_compile_options(${lib} PRIVATE ${KERNEL_CORE_FLAGS} ${KERNEL_CORE_FLAGS_${isa}})
  target_compile_definitions(${lib} PRIVATE KERNEL_CORE_ISA=${isa} KERNEL_CORE_ISA_${isa}=1)
  target_include_directories(${lib} PRIVATE "${KERNEL_CORE_ROOT}/include" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  target_link_libraries(${lib} PRIVATE OpenMP::OpenMP_CXX)
  set_target_properties(${lib} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  target_link_libraries(${module} PRIVATE ${lib})
endfunction()

function(kernel_core_add_module name)
  cmake_parse_arguments(ARG "" "PACKAGE" "BINDINGS;KERNELS;AMX" ${ARGN})
  if(NOT ARG_PACKAGE)
    set(ARG_PACKAGE "${PROJECT_NAME}")
  endif()
  set(target "${ARG_PACKAGE}${name}") # unique under the root build; the file keeps the short name
  pybind11_add_module(${target} MODULE NO_EXTRAS ${ARG_BINDINGS})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME "${name}" CXX_VISIBILITY_PRESET hidden)
  target_compile_options(${target} PRIVATE ${KERNEL_CORE_FLAGS})
  target_include_directories(${target} PRIVATE "${KERNEL_CORE_ROOT}/include" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  target_link_libraries(${target} PRIVATE OpenMP::OpenMP_CXX)
  if(ARG_KERNELS)
    foreach(isa IN LISTS KERNEL_CORE_ISAS)
      _kernel_core_isa_library(${target} ${isa} ${ARG_KERNELS})
    endforeach()
  endif()
  if(ARG_AMX AND KERNEL_CORE_HAS_AMX)
    _kernel_core_isa_library(${target} amx ${ARG_AMX})
    target_compile_definitions(${target} PRIVATE KERNEL_CORE_HAS_AMX=1)
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION "${ARG_PACKAGE}")
endfunction()

include(KernelCoreCuda)
