"""Generated source as a program that runs on host arrays."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cann_ops.emulate import build
from cann_ops.emulate.arguments import AscArgument, pack
from cann_ops.emulate.errors import from_message
from cann_ops.emulate.source import KernelSource, kernels

UB_BYTES = 248 << 10  # of 256 KiB what SIMD code may use
UB_BYTES_WITH_SIMT = 216 << 10  # any SIMT function takes 32 KiB of it as cache
MOST_CORES = 64
# The runtime of a library has one machine and takes over the handlers of memory faults while it runs.
_ONE_AT_A_TIME = threading.Lock()


class _Buffer(ctypes.Structure):
    """AscBuffer of asc_host/launch.hpp."""

    _fields_ = (("name", ctypes.c_char_p), ("first", ctypes.c_uint32), ("bytes", ctypes.c_uint32))


class _Options(ctypes.Structure):
    """AscOptions of asc_host/launch.hpp."""

    _fields_ = (
        ("cores", ctypes.c_int32),
        ("ub_bytes", ctypes.c_uint32),
        ("checked", ctypes.c_int32),
        ("barrier_blocks_scalar", ctypes.c_int32),
        ("threads_read_undefined", ctypes.c_int32),
        ("buffer_count", ctypes.c_int32),
        ("buffers", ctypes.c_void_p),
        ("most_steps", ctypes.c_uint64),
        ("counts", ctypes.c_uint64 * 4),
    )


@dataclass(frozen=True)
class Report:
    """What a run did.

    Attributes:
        defined: for each tensor a bool a byte: was it given or written with a defined value?
        read_bytes, written_bytes: of global memory by copies and results (scalar and SIMT accesses are not counted).
        instructions: begun on all pipes but S; a SIMD or SIMT function is one.
    """

    defined: dict[str, np.ndarray]
    read_bytes: int
    written_bytes: int
    instructions: int


class Program:
    """Compiled source with one kernel or more.

    Tensors are copied in, the cores run one after another in a fixed order, and what the kernel wrote is copied back if
    no error was found; after an error the tensors are as they were. Nothing is kept between runs.
    """

    def __init__(self, source: str) -> None:
        """Compile, or take from the cache. CompileError names what the emulator does not have; ValueError without a
        kernel in the text."""
        self.kernels: dict[str, KernelSource] = {kernel.name: kernel for kernel in kernels(source)}
        self._order = list(self.kernels)
        self._simt = "__simt_vf__" in source
        self._library = build.library(source)
        self._library.asc_host_run.restype = ctypes.c_int

    def run(
        self,
        arguments: Mapping[str, Any],
        *,
        cores: int,
        kernel: str | None = None,
        undefined: Iterable[str] = (),
        ub_bytes: int | None = None,
        buffers: Mapping[str, tuple[int, int]] | None = None,
        checked: bool = True,
        barrier_blocks_scalar: bool = False,
        threads_read_undefined: bool = False,
        most_steps: int = 2_000_000_000,
    ) -> Report:
        """Run a kernel.

        Args:
            arguments: tensors (torch on the CPU, also views with steps, or contiguous numpy arrays) and numbers by the
                names of the parameters.
            cores: blocks of the grid, 1 to 64; a block of a mixed kernel has a cube core and two vector cores.
            kernel: which one, where the source has several.
            undefined: tensors whose bytes count as never written; results should be among them. Bytes that the kernel
                does not write come back as 0xff.
            ub_bytes: what the kernel may use of UB; by default all that the device allows such a kernel.
            buffers: (first byte, bytes) in UB by name. If given, an access of UB begins in one of them and stays in it;
                only a load of a whole register may reach over its end.
            checked: also look for races and undefined data. Bounds, alignment and pairing of flags are always checked.
            barrier_blocks_scalar: take a barrier of one pipe as one that the scalar unit waits for too. The device's
                documents do not say so; TileLang's generated code relies on it where a copy's address is read from UB.
            threads_read_undefined: SIMT threads may read what nothing has written and get 0xff bytes, as those beyond
                the rows of a last tile do. What they make of it counts as defined, so compare it with a reference.
            most_steps: instructions and accesses of scalar code and threads after which the run ends with a FlagError.

        Raises a subclass of EmulationError for what the kernel does wrong, ValueError for wrong arguments.
        """
        chosen = self._choose(kernel)
        limit = UB_BYTES_WITH_SIMT if self._simt else UB_BYTES
        allowed = limit if ub_bytes is None else ub_bytes
        if not 1 <= cores <= MOST_CORES:
            raise ValueError(f"cores: got {cores}, allowed are 1 to {MOST_CORES}")
        if not 0 <= allowed <= limit:
            raise ValueError(f"ub_bytes: got {allowed}, allowed are 0 to {limit} for this source")
        if most_steps < 1:
            raise ValueError(f"most_steps: got {most_steps}, allowed are 1 and more")
        parts = _buffers(buffers or {}, allowed)
        packed = pack(chosen, arguments, frozenset(undefined))
        options = _Options(cores, allowed, int(checked), int(barrier_blocks_scalar), int(threads_read_undefined))
        options.buffer_count, options.buffers = len(parts), ctypes.addressof(parts)
        options.most_steps = most_steps
        message = ctypes.create_string_buffer(4096)
        index = self._order.index(chosen.name)
        items = ctypes.cast(packed.items, ctypes.POINTER(AscArgument))
        count = len(chosen.parameters)
        size = ctypes.c_uint64(len(message))
        with _ONE_AT_A_TIME:
            failed = self._library.asc_host_run(index, items, count, ctypes.byref(options), message, size)
        if failed:
            raise from_message(message.value.decode(errors="replace"))
        shadows = {name: shadow.astype(bool) for name, shadow in packed.shadows.items()}
        return Report(shadows, options.counts[0], options.counts[1], options.counts[3])

    def _choose(self, kernel: str | None) -> KernelSource:
        if kernel is None:
            if len(self._order) > 1:
                raise ValueError(f"kernel: got None, allowed are {', '.join(self._order)}")
            return self.kernels[self._order[0]]
        if kernel not in self.kernels:
            raise ValueError(f"kernel: got {kernel!r}, allowed are {', '.join(self._order)}")
        return self.kernels[kernel]


def _buffers(buffers: Mapping[str, tuple[int, int]], allowed: int) -> Any:
    """An array of the runtime; ValueError for a buffer outside of UB or over another."""
    end, before = 0, ""
    for name, (first, size) in sorted(buffers.items(), key=lambda item: item[1]):
        if first < 0 or size < 1 or first + size > allowed:
            raise ValueError(f"buffers: got {name} at {first} with {size} bytes, allowed is within [0, {allowed})")
        if first < end:
            raise ValueError(f"buffers: got {name} at {first}, but {before} ends at {end}")
        end, before = first + size, name
    return (_Buffer * len(buffers))(*[_Buffer(name.encode(), *place) for name, place in buffers.items()])
