// Part of c_api/asc_simd.h on the host.
#pragma once

#include "c_api/asc_simd.h"
