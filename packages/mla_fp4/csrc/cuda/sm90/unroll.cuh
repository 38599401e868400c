// Loop hints for nvcc alone: host compilers that build this code for tests would warn.
#pragma once

#if defined(__CUDACC__)
#define MLA_FP4_UNROLL _Pragma("unroll")
#define MLA_FP4_NO_UNROLL _Pragma("unroll 1")
#else
#define MLA_FP4_UNROLL
#define MLA_FP4_NO_UNROLL
#endif
