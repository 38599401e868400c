"""The few calls of CANN's runtime library that a launch needs, by ctypes: load, find, launch.

Written from the public declarations. No header of CANN is needed to build or to import this.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cann_ops.errors import CannUnavailableError
from cann_ops.lowering import Parameter

_DYNAMIC_UNIFIED_BUFFER = 2
_FORMATS = {"float": "f", "int32_t": "i", "int64_t": "q", "uint32_t": "I", "uint8_t": "B", "bool": "B"}


class _Attribute(ctypes.Structure):
    """An attribute of a launch: its number, and a union of 16 bytes."""

    _fields_ = (("id", ctypes.c_int32), ("value", ctypes.c_uint32 * 4))


class _Configuration(ctypes.Structure):
    _fields_ = (("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_size_t))


def pack_arguments(parameters: Sequence[Parameter], values: Sequence[int | float]) -> bytes:
    """A kernel's arguments as the launch takes them: each at a multiple of its size (4 at least), whole words of 8."""
    packed = bytearray()
    for parameter, value in zip(parameters, values, strict=True):
        if not parameter.pointer and parameter.kind not in _FORMATS:
            allowed = ", ".join(_FORMATS)
            raise ValueError(f"{parameter.name}: got a scalar of {parameter.kind}, allowed are {allowed}")
        form = "Q" if parameter.pointer else _FORMATS[parameter.kind]
        size = max(4, struct.calcsize(form))
        packed.extend(b"\0" * (-len(packed) % size))
        packed.extend(struct.pack(f"<{form}", value))
    packed.extend(b"\0" * (-len(packed) % 8))
    return bytes(packed)


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libascendcl.so")
    except OSError as error:
        raise CannUnavailableError(f"libascendcl.so does not load ({error}); source CANN's set_env.sh") from error


def _check(result: int, call: str) -> None:
    if result:
        message = _library().aclGetRecentErrMsg
        message.restype = ctypes.c_char_p
        raise RuntimeError(f"{call} failed with {result}: {(message() or b'').decode(errors='replace')}")


@cache
def function(binary: Path, name: str, device: int) -> ctypes.c_void_p:
    """The handle of a kernel on a device; a binary is loaded once a device and stays."""
    data = binary.read_bytes()
    loaded, found = ctypes.c_void_p(), ctypes.c_void_p()
    acl = _library()
    _check(
        acl.aclrtBinaryLoadFromData(data, ctypes.c_size_t(len(data)), None, ctypes.byref(loaded)),
        "aclrtBinaryLoadFromData",
    )
    _check(acl.aclrtBinaryGetFunction(loaded, name.encode(), ctypes.byref(found)), "aclrtBinaryGetFunction")
    return found


def launch(handle: ctypes.c_void_p, grid: int, stream: int, unified_bytes: int, arguments: bytes) -> None:
    """Enqueue a kernel on a stream. Does not wait; the runtime copies the arguments."""
    attribute = _Attribute(_DYNAMIC_UNIFIED_BUFFER, (ctypes.c_uint32 * 4)(unified_bytes))
    configuration = _Configuration(ctypes.pointer(attribute), 1)
    result = _library().aclrtLaunchKernelWithHostArgs(
        handle,
        ctypes.c_uint32(grid),
        ctypes.c_void_p(stream),
        ctypes.byref(configuration) if unified_bytes else None,
        arguments,
        ctypes.c_size_t(len(arguments)),
        None,
        ctypes.c_size_t(0),
    )
    _check(result, "aclrtLaunchKernelWithHostArgs")
