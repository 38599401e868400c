"""The compiled module's staging plan, its own code on the host, with a queue of Python functions."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_core.testing.host import host_library

HERE = Path(__file__).parent
_I, _U = ctypes.c_int64, ctypes.c_uint64
_LIST = ctypes.POINTER(_U)
_CALLS = {
    "before": (_I, _I),
    "copy": (_I, _LIST, _LIST, _LIST, _I),
    "rows": (_I, _U, _U, _U, _U, _U, _U),
    "after": (_I, _I),
    "deal": (_I, _U, _I, _I),
}
_TYPES = {name: ctypes.CFUNCTYPE(ctypes.c_int, *arguments) for name, arguments in _CALLS.items()}
FIELDS = ("source", "stride", "slots", "count", "offset", "size", "area", "part_bytes", "parts", "part", "first",
          "per_call", "regular_from", "streams", "stream")  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = [(name, _U) for name in FIELDS]  # each of eight bytes


class _Calls(ctypes.Structure):
    _fields_ = list(_TYPES.items())


@functools.cache
def _library() -> ctypes.CDLL:
    folder = tempfile.TemporaryDirectory()
    library = host_library(HERE / "host/stage.cpp", Path(folder.name), HERE.parent / "csrc")
    library.folder = folder  # type: ignore[attr-defined]
    return library


def run_stage(queue: Any, **plan: int) -> int:
    """Rounds of the plan; `queue` has a method for each call. Raises what a call raised, ValueError for a bad plan."""
    errors: list[BaseException] = []

    def answering(method: Callable[..., None]) -> Callable[..., int]:
        def call(*values: Any) -> int:
            try:
                method(*values)
            except BaseException as error:
                errors.append(error)
                return 1
            return 0

        return call

    calls = _Calls(*(_TYPES[name](answering(getattr(queue, name))) for name in _CALLS))
    rounds = _I()
    status = _library().stage_host(ctypes.byref(_Plan(**plan)), ctypes.byref(calls), ctypes.byref(rounds))
    if errors:
        assert status == 1 and len(errors) == 1, "an error did not end the run"
        raise errors[0]
    if status:
        raise ValueError(f"stage: {plan}")
    return rounds.value
