"""Where a model lives: naming a device, and bringing weights there."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar, cast

import torch

DeviceName = Literal["cpu", "cuda"]
_T = TypeVar("_T")


def resolve_device(name: str) -> torch.device:
    """The device of that name. ValueError says why it cannot be used here and what to do."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "npu":
        raise ValueError(f"device: got 'npu', allowed are 'cpu' and 'cuda' here: {_npu_missing()}")
    if name != "cuda":
        raise ValueError(f"device: got {name!r}, allowed are 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        why = "sees no NVIDIA GPU" if torch.version.cuda else "is a build without CUDA"
        raise ValueError(f"device: got 'cuda', allowed is 'cpu' here: PyTorch {torch.__version__} {why}")
    from kernel_core.cuda import cuda_module

    for package in ("mla_fp4", "swa_replay", "mega_moe", "mhc_engram"):
        try:
            cuda_module(package)
        except RuntimeError as error:
            raise ValueError(f"device: got 'cuda', allowed is 'cpu' here: {error}") from None
    return torch.device("cuda", torch.cuda.current_device())


def _npu_missing() -> str:
    """What an engine on an Ascend NPU lacks on this machine."""
    try:
        import cann_ops
    except ImportError as error:
        return f"cann_ops does not import ({error})"
    there, why = cann_ops.is_available()
    return "the engine does not run on cann_ops' kernels yet, which ran in emulation alone" if there else why


def moved(value: _T, device: torch.device) -> _T:
    """A copy of dataclasses, lists, tuples and dicts of tensors with all tensors on `device`; the same on the CPU.

    Engram tables, which are mapped from their files on a CPU, are read whole.
    """
    if device.type == "cpu":
        return value
    return cast(_T, _moved(value, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _holds_tensors(value):
        return dataclasses.replace(
            value, **{f.name: _moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    return value


def _holds_tensors(value: Any) -> bool:
    """Configurations are left alone: they are frozen and checked when they are made."""
    from orchestrator.model.config import ModelConfig

    return not isinstance(value, ModelConfig)
