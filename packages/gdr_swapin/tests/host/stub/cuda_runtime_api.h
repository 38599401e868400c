// The two names that launchers' declarations need, for host builds of device code.
#pragma once

using cudaError_t = int;
using cudaStream_t = void*;
