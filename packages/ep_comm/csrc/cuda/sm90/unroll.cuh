// `#pragma unroll`, which host compilers do not know.
#pragma once

#if defined(__CUDACC__)
#define EP_COMM_UNROLL _Pragma("unroll")
#else
#define EP_COMM_UNROLL
#endif
