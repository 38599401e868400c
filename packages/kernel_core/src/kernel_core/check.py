"""Argument checks with one voice: they name the argument, what came and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def require(condition: bool, argument: str, got: object, allowed: str) -> None:
    """Raise `ValueError` naming `argument` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{argument}: got {got}, allowed is {allowed}")


def tensor(
    argument: str,
    value: torch.Tensor,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...] | None = None,
    contiguous: bool = True,
) -> None:
    """Check dtype, shape (`None` matches any size) and contiguity of a tensor argument."""
    # The usual case first and quickly: a decode step makes some hundred checks.
    actual = value.shape
    known = value.dtype is dtype or (isinstance(dtype, tuple) and value.dtype in dtype)
    if known and (not contiguous or value.is_contiguous()):
        if shape is None or actual == shape:
            return
        if len(actual) == len(shape):
            for want, got in zip(shape, actual, strict=True):
                if want is not None and want != got:
                    break
            else:
                return
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if value.dtype not in allowed:
        raise ValueError(f"{argument}: got dtype {value.dtype}, allowed is {' or '.join(map(str, allowed))}")
    if shape is not None and (
        len(actual) != len(shape) or any(s is not None and s != a for s, a in zip(shape, actual, strict=True))
    ):
        wanted = ", ".join("*" if s is None else str(s) for s in shape)
        raise ValueError(f"{argument}: got shape {list(actual)}, allowed is [{wanted}]")
    if contiguous and not value.is_contiguous():
        raise ValueError(f"{argument}: got strides {value.stride()}, allowed is a contiguous tensor")


def exactly(*arguments: tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]) -> None:
    """Check (name, tensor, dtype, shape) of several contiguous tensors, each size known; quick when all are right."""
    for name, value, dtype, shape in arguments:
        if value.dtype is not dtype or value.shape != shape or not value.is_contiguous():
            tensor(name, value, dtype=dtype, shape=shape)
