"""A kernel on the current NPU stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cann_ops.emulate.build import templates_dir
from cann_ops.errors import CannUnavailableError
from cann_ops.lowering import Lowered
from cann_ops.runtime import acl, binaries


def run(lowered: Lowered, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int | float]) -> None:
    """Enqueue behind whatever the stream holds; the caller's tensors stay alive through the stream's order.

    A tensor that another stream made has to be recorded there by the caller, as for any op of PyTorch.
    """
    binary = binaries.binary_path(lowered)
    if not binary.is_file():
        templates = templates_dir()
        if templates is None:
            raise CannUnavailableError(f"{lowered.kernel} is not compiled ({binary}); run python -m cann_ops.build")
        binary = binaries.build(lowered, templates)
    values: list[Any] = [tensors[p.name].data_ptr() if p.pointer else scalars[p.name] for p in lowered.parameters]
    device = next(iter(tensors.values())).device.index or 0
    handle = acl.function(binary, lowered.name, device)
    acl.launch(
        handle, lowered.grid, _stream(device), lowered.unified_bytes, acl.pack_arguments(lowered.parameters, values)
    )


def _stream(device: int) -> int:
    """The raw handle of torch_npu's current stream, with what its task queue holds already submitted."""
    return int(torch.npu.current_stream(device).npu_stream)  # type: ignore[attr-defined]
