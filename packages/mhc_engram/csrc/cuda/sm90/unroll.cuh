// Loop hints for nvcc alone: host compilers that build this code for tests would warn.
#pragma once

#if defined(__CUDACC__)
#define MHC_ENGRAM_UNROLL _Pragma("unroll")
#define MHC_ENGRAM_ROLLED _Pragma("unroll 1")
#define MHC_ENGRAM_UNROLL_32 _Pragma("unroll 32")
#else
#define MHC_ENGRAM_UNROLL
#define MHC_ENGRAM_ROLLED
#define MHC_ENGRAM_UNROLL_32
#endif
