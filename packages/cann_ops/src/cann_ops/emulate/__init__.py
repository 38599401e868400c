"""Generated AscendC on the host: compiled with g++ against our headers, run on torch and numpy arrays, and checked.

It shows that a kernel's arithmetic, addresses and synchronisation hold under our reading of the public documents. It
is no device: nothing here says that CANN's compiler takes the source, how fast it is, or what the chip rounds
otherwise. See the README of `packages/cann_ops/emulator`.
"""

from cann_ops.emulate.build import available
from cann_ops.emulate.errors import (
    AlignmentError,
    BoundsError,
    CompileError,
    DeviceAssertError,
    EmulationError,
    FlagError,
    InstructionError,
    RaceError,
    UndefinedError,
)
from cann_ops.emulate.lowered import run_lowered
from cann_ops.emulate.program import MOST_CORES, UB_BYTES, UB_BYTES_WITH_SIMT, Program, Report

__all__ = [
    "MOST_CORES",
    "UB_BYTES",
    "UB_BYTES_WITH_SIMT",
    "AlignmentError",
    "BoundsError",
    "CompileError",
    "DeviceAssertError",
    "EmulationError",
    "FlagError",
    "InstructionError",
    "Program",
    "RaceError",
    "Report",
    "UndefinedError",
    "available",
    "run_lowered",
]
