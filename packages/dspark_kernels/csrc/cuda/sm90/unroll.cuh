// Loop hints for nvcc alone: host compilers that build this code for tests would warn.
#pragma once

#if defined(__CUDACC__)
#define DSPARK_UNROLL _Pragma("unroll")
#define DSPARK_KEEP_LOOP _Pragma("unroll 1")
#else
#define DSPARK_UNROLL
#define DSPARK_KEEP_LOOP
#endif
