"""Messages of an expert-parallel group as bytes, and bytes as the int64 rows that its collectives carry."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from orchestrator.balance.eplb.messages import Turn

_T = TypeVar("_T")


def encode(value: object) -> bytes:
    """MessagePack of dataclasses, containers and numpy arrays."""
    return msgspec.msgpack.encode(value, enc_hook=_array_out)


def decode(data: bytes, kind: type[_T]) -> _T:
    """The value of that type; `msgspec.ValidationError` for any other."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_array_in)


def is_empty(turn: Turn) -> bool:
    """Whether a turn says nothing but its step."""
    return not (turn.flips or turn.prepares or turn.chunks or turn.dropped) and turn.held is None


def as_rows(data: bytes) -> torch.Tensor:
    """int64 [ceil(n / 8)], zeros behind the last byte."""
    padded = data + bytes(-len(data) % 8)
    return torch.frombuffer(bytearray(padded), dtype=torch.int64) if padded else torch.zeros(0, dtype=torch.int64)


def from_rows(rows: torch.Tensor, length: int) -> bytes:
    """The first `length` bytes of what `as_rows` gave."""
    return rows.contiguous().numpy().tobytes()[:length]


def _array_out(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} has no form on the wire")


def _array_in(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    raise NotImplementedError(f"{kind} has no form on the wire")
