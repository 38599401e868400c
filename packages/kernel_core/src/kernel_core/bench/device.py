"""What GPU benches of several packages share: the compiled module if there is one, handles, and a comparison."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def cuda_module(name: str, function: str) -> ModuleType | None:
    """The compiled module `name` where it is built and has `function`, else None. A module that cannot load raises."""
    try:
        built = importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    return built if hasattr(built, function) else None


def stream() -> int:
    """Handle of the current stream."""
    return torch.cuda.current_stream().cuda_stream


def address(tensor: torch.Tensor | None) -> int:
    """0 for None, which our modules read as absent."""
    return 0 if tensor is None else tensor.data_ptr()


def multiprocessors() -> int:
    """Of the current device."""
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def assert_near(name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Raises ArithmeticError where the norm of the difference passes `limit` times that of `expected`, or is NaN."""
    a, b = actual.detach().float().cpu(), expected.detach().float().cpu()
    error = float((a - b).norm() / b.norm().clamp_min(1e-20))
    if not error < limit:
        raise ArithmeticError(f"{name}: relative error {error:.2e} against the reference, allowed is {limit:.1e}")
