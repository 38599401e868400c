// Loop hints for nvcc alone: host compilers that build this code for tests would warn.
#pragma once

#if defined(__CUDACC__)
#define MEGA_MOE_UNROLL _Pragma("unroll")
#define MEGA_MOE_UNROLL_4 _Pragma("unroll 4")
#else
#define MEGA_MOE_UNROLL
#define MEGA_MOE_UNROLL_4
#endif
