"""Kernels as `cann_ops.lowering` gives them: grid, UB and dynamic sizes come with the text."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from cann_ops.emulate.program import Program, Report


@functools.lru_cache(maxsize=64)
def _program(source: str) -> Program:
    return Program(source)


def run_lowered(
    lowered: Any,
    tensors: Mapping[str, Any],
    *,
    undefined: Iterable[str] = (),
    scalars: Mapping[str, int | float] | None = None,
    **options: Any,
) -> Report:
    """Run a `cann_ops.lowering.Lowered` on host tensors.

    Args:
        lowered: the text with its grid, bytes of UB and dynamic sizes.
        tensors: by the names of the program's parameters.
        undefined: tensors that the kernel has to write; results should be among them.
        scalars: numbers that are not the size of a tensor.
        options: further ones of `Program.run`.

    An access beyond the UB that TileLang planned for the kernel is an error, not only one beyond the device's.
    """
    given: dict[str, Any] = dict(tensors) | dict(scalars or {})
    for name, (tensor, axis) in lowered.sizes.items():
        if tensor in tensors:
            given.setdefault(name, int(tensors[tensor].shape[axis]))
    program = _program(lowered.source)
    names = {p.name for p in program.kernels[lowered.name].parameters}
    given = {name: value for name, value in given.items() if name in names or name in tensors}
    settings = {"cores": lowered.grid, "ub_bytes": lowered.unified_bytes} | options
    return program.run(given, kernel=lowered.name, undefined=undefined, **settings)
