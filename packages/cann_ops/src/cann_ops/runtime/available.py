"""Whether kernels can run on an NPU here: the first step that fails, and what to do about it."""

from __future__ import annotations

import importlib.util
from typing import Any

from cann_ops.errors import CannUnavailableError

_SUPPORTED = "Ascend950"


def is_available() -> tuple[bool, str]:
    """(True, "") where an Ascend 950 can be used through torch_npu, else (False, why).

    Probes in order: torch_npu is installed; it imports (without CANN it does not); it sees a device; the device is an
    Ascend 950. Imports torch_npu if it is there, so the first call may take seconds.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return False, "torch_npu is not installed; install the torch_npu that fits this PyTorch and CANN 9.2"
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return False, f"torch_npu does not import ({error}); CANN's libraries are missing: source its set_env.sh"
    import torch

    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        return False, "torch_npu sees no device; look at npu-smi info, and at ASCEND_RT_VISIBLE_DEVICES"
    name = str(npu.get_device_name())
    if not name.startswith(_SUPPORTED):
        return False, f"the device is {name}; the kernels are written for {_SUPPORTED} (dav-3510)"
    return True, ""


def require_npu(op: str) -> None:
    """Raise CannUnavailableError naming what is missing."""
    there, why = is_available()
    if not there:
        raise CannUnavailableError(f"{op} needs an Ascend 950: {why}")
