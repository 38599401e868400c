"""Tensors and scalars for a kernel's parameters: checked, and as the structures that the runtime takes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cann_ops.emulate.source import KernelSource, Parameter

Array = torch.Tensor | np.ndarray


class AscArgument(ctypes.Structure):
    """As in asc_host/launch.hpp."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("is_tensor", ctypes.c_int32),
        ("undefined", ctypes.c_int32),
        ("defined", ctypes.c_void_p),
    )


_TORCH: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32,),
    "half": (torch.float16,),
    "bfloat16_t": (torch.bfloat16,),
    "int64_t": (torch.int64,),
    "int32_t": (torch.int32,),
    "int16_t": (torch.int16,),
    "int8_t": (torch.int8,),
    "bool": (torch.bool, torch.uint8),
    "uint8_t": (torch.uint8,),
    "uint16_t": (torch.uint16, torch.int16),
    "uint32_t": (torch.uint32, torch.int32),
    "uint64_t": (torch.uint64, torch.int64),
    "float8_e4m3_t": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e4_t": (torch.float8_e4m3fn, torch.uint8),
    "float8_e5m2_t": (torch.float8_e5m2, torch.uint8),
    "fp8_e5_t": (torch.float8_e5m2, torch.uint8),
    "float8_e8m0_t": (torch.uint8,),
    "fp8_e8_t": (torch.uint8,),
    "float4_e2m1x2_t": (torch.uint8, torch.int8),
}
_NUMPY = {"float": "float32", "half": "float16", "bfloat16_t": "uint16", "bool": "bool"}
_SCALARS = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    **{f"{sign}int{bits}_t": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass
class Packed:
    """The runtime's list, and what has to live as long as it."""

    items: Any
    shadows: dict[str, np.ndarray]
    alive: list[Any] = field(default_factory=list)


def pack(kernel: KernelSource, given: Mapping[str, Any], undefined: frozenset[str]) -> Packed:
    """Arguments by name; ValueError for a missing or unknown one and for a wrong type, before anything runs."""
    names = [p.name for p in kernel.parameters]
    missing = [name for name in names if name not in given]
    if missing or (unknown := set(given) - set(names)):
        said = f"without {', '.join(missing)}" if missing else f"also {', '.join(sorted(unknown))}"
        raise ValueError(f"arguments of {kernel.name}: got them {said}, allowed are exactly {', '.join(names)}")
    tensors = {p.name for p in kernel.parameters if p.is_tensor}
    if strange := undefined - tensors:
        raise ValueError(f"undefined: got {', '.join(sorted(strange))}, allowed are {', '.join(sorted(tensors))}")
    packed = Packed((AscArgument * len(names))(), {})
    for item, parameter in zip(packed.items, kernel.parameters, strict=True):
        item.name = parameter.name.encode()
        if parameter.is_tensor:
            _tensor(packed, item, parameter, given[parameter.name], parameter.name in undefined)
        else:
            _scalar(packed, item, parameter, given[parameter.name])
    return packed


def _tensor(packed: Packed, item: AscArgument, parameter: Parameter, value: Any, undefined: bool) -> None:
    item.is_tensor, item.undefined = 1, int(undefined)
    item.data, item.bytes = _memory(parameter, value)
    shadow = np.zeros(item.bytes, np.uint8)
    item.defined = shadow.ctypes.data if item.bytes else None
    packed.shadows[parameter.name] = shadow
    packed.alive.append(value)


def _memory(parameter: Parameter, value: Any) -> tuple[int, int]:
    """Address and bytes."""
    if isinstance(value, torch.Tensor):
        allowed = _TORCH.get(parameter.kind)
        if allowed is None:
            raise ValueError(
                f"{parameter.name}: its type {parameter.kind} is not known, allowed are {', '.join(_TORCH)}"
            )
        if value.dtype not in allowed or value.device.type != "cpu":
            dtypes = " or ".join(map(str, allowed))
            raise ValueError(f"{parameter.name}: got {value.dtype} on {value.device}, allowed is {dtypes} on the CPU")
        if value.numel() == 0:
            return value.data_ptr(), 0
        # From the first to the last element: a view with steps brings what lies between along.
        last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        return value.data_ptr(), (last + 1) * value.element_size()
    if isinstance(value, np.ndarray):
        wanted = _NUMPY.get(parameter.kind, parameter.kind.removesuffix("_t"))
        wanted = wanted if hasattr(np, wanted) else "uint8"
        if value.dtype != np.dtype(wanted) or not value.flags.c_contiguous or not value.flags.writeable:
            raise ValueError(f"{parameter.name}: got {value.dtype}, allowed is a contiguous writable {wanted} array")
        return value.ctypes.data, value.nbytes
    raise ValueError(f"{parameter.name}: got {type(value).__name__}, allowed is a torch.Tensor or numpy.ndarray")


def _scalar(packed: Packed, item: AscArgument, parameter: Parameter, value: Any) -> None:
    kind = _SCALARS[parameter.kind]
    if isinstance(value, (torch.Tensor, np.ndarray)) or not isinstance(value, (bool, int, float, np.number)):
        raise ValueError(f"{parameter.name}: got {type(value).__name__}, allowed is a number ({parameter.kind})")
    number = kind(value if parameter.kind == "float" else int(value))
    if parameter.kind != "float" and int(number.value) != value:
        raise ValueError(f"{parameter.name}: got {value}, allowed are values of {parameter.kind}")
    item.data, item.bytes = ctypes.addressof(number), ctypes.sizeof(number)
    packed.alive.append(number)
