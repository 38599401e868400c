// Row codecs, compiled for each instruction set.
#include "kernel_core/decode.hpp"
