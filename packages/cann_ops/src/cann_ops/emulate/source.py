"""Reading generated AscendC and preparing it for a host compiler.

The text stays as it is but for three things, on the same lines: addresses of UB become addresses of the running core's
buffer, a SIMD function announces itself, and a call of a SIMT function carries its name and line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_KERNEL = re.compile(r'extern "C" __global__ (__vector__|__cube__|__mix__\([^)]*\)) void (\w+)\(([^)]*)\)')
_UB_ADDRESS = re.compile(r"\(__ubuf__ (\w+) ?\*\)(\d+)\b")
_SIMD = re.compile(r"(__simd_vf__ inline void (\w+)\([^)]*\) \{)")
_SIMT_CALL = re.compile(r"\basc_vf_call<(\w+)>\(")

SCALARS = ("int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "float", "bool")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; `kind` is its C type without the address space and without the star."""

    name: str
    kind: str
    is_tensor: bool


@dataclass(frozen=True)
class KernelSource:
    """A kernel in the text: `core` is "vector", "cube" or "mix"."""

    name: str
    core: str
    parameters: tuple[Parameter, ...]


def kernels(source: str) -> tuple[KernelSource, ...]:
    """The kernels of generated source, in order. ValueError if there is none or a parameter has an unknown type."""
    found = tuple(
        KernelSource(name, core.strip("_").split("__")[0], tuple(map(_parameter, _split(listed))))
        for core, name, listed in _KERNEL.findall(source)
    )
    if not found:
        raise ValueError('source: got a text without a kernel, allowed is AscendC with extern "C" __global__ functions')
    return found


def _split(listed: str) -> list[str]:
    return [part.strip() for part in listed.split(",") if part.strip()]


def _parameter(text: str) -> Parameter:
    words = re.sub(r"__gm__|__restrict__|\bconst\b|\*", " ", text).split()
    if len(words) != 2:
        raise ValueError(f"source: got the parameter {text!r}, allowed is a type and a name")
    kind, name = words
    is_tensor = "*" in text
    if not is_tensor and kind not in SCALARS:
        raise ValueError(f"source: got the scalar parameter {text!r}, allowed types are {', '.join(SCALARS)}")
    return Parameter(name, kind, is_tensor)


def translate(source: str) -> str:
    """A translation unit of C++ for the emulator's headers: the text and a table of its kernels."""
    listed = kernels(source)
    body = _UB_ADDRESS.sub(r"((__ubuf__ \1 *)(asc_host::ub_base() + \2))", source)
    body = _SIMD.sub(r'\1 asc_host::SimdRegion simd_region_("\2");', body)
    body = _SIMT_CALL.sub(r'asc_host::call_threads<\1>("\1", __LINE__, ', body)
    lines = ['#include "c_api/asc_simd.h"', '#line 1 "generated.asc"', body, "namespace asc_host {"]
    rows = []
    for index, kernel in enumerate(listed):
        given = ", ".join(_argument(i, p) for i, p in enumerate(kernel.parameters))
        lines.append(f"static void run_{index}([[maybe_unused]] void* const* slots) {{ ::{kernel.name}({given}); }}")
        cores = 3 if kernel.core == "mix" else 1
        kind = "kVector" if kernel.core == "vector" else "kCube"
        rows.append(f'  {{"{kernel.name}", {cores}, CoreKind::{kind}, run_{index}}},')
    lines += ["const Kernel kKernels[] = {", *rows, "};", f"const int kKernelCount = {len(rows)};", "}"]
    return "\n".join(lines) + "\n"


def _argument(index: int, parameter: Parameter) -> str:
    star = "*" if parameter.is_tensor else ""
    return f"*reinterpret_cast<{parameter.kind}{star} const*>(slots + {index})"
