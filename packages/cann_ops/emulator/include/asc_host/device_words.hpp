// Words of the device language that mean nothing to a host compiler, and the two that ask for the kind of core.
#pragma once

#include "asc_host/machine.hpp"

#define __NPU_ARCH__ 3510
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __aicore__
#define __global__
#define __vector__
#define __cube__
#define __mix__(cube, vector)
#define __simd_vf__
#define __simd_callee__
#define __simt_vf__
#define __simt_callee__
#define __launch_bounds__(threads)
#define __grid_constant__
#define __SIMT_DEVICE_FUNCTIONS_DECL__
#define ASC_IS_AIC (asc_host::core_kind() == asc_host::CoreKind::kCube)
#define ASC_IS_AIV (asc_host::core_kind() == asc_host::CoreKind::kVector)

namespace AscendC {}
inline int asc_get_sub_block_id() { return asc_host::sub_block(); }
