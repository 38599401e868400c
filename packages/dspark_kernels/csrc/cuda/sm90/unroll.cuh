// Loop hints for nvcc alone: host compilers that build this code for tests would warn.
#pragma once

#if defined(__CUDACC__)
#define DSPARK_UNROLL _Pragma("unroll")
#else
#define DSPARK_UNROLL
#endif
