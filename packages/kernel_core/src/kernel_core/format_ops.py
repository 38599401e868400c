"""`torch.ops.kernel_core.*`: the native codecs for torch.compile and for callers that have only the dispatcher.

Importing this module registers them; the PyTorch reference serves as the fake implementation, and as what an NVIDIA GPU
runs: it works on any device and reads nothing back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_core import formats, native_formats
from kernel_core.backend import elsewhere, register_op

_SCHEMAS = {
    "quantize_main": "(Tensor x) -> Tensor",
    "dequantize_main": "(Tensor rows) -> Tensor",
    "quantize_window": "(Tensor x) -> Tensor",
    "dequantize_window": "(Tensor rows) -> Tensor",
    "quantize_index": "(Tensor x) -> Tensor",
    "dequantize_index": "(Tensor rows) -> Tensor",
    "quantize_mxfp4": "(Tensor weight) -> (Tensor, Tensor)",
    "dequantize_mxfp4": "(Tensor codes, Tensor scales) -> Tensor",
    "quantize_fp8_block": "(Tensor weight) -> (Tensor, Tensor)",
    "dequantize_fp8_block": "(Tensor weight, Tensor scales) -> Tensor",
    "quantize_fp8_rows": "(Tensor table) -> (Tensor, Tensor)",
    "dequantize_fp8_rows": "(Tensor table, Tensor scales) -> Tensor",
}


def _implementation(name: str) -> Callable[..., Any]:
    native, library = getattr(native_formats, name), getattr(formats, name)

    def run(first: Any, *rest: Any) -> Any:
        return (library if elsewhere(f"kernel_core.{name}", first) else native)(first, *rest)

    return run


for _name, _signature in _SCHEMAS.items():
    register_op("kernel_core", _name + _signature, _implementation(_name), getattr(formats, _name))
