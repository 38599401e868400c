"""Choosing a backend: native modules, their instruction set, and the reference for tests.

No environment variable changes numerics. `using("reference")` and `limit_isa(...)` are explicit and scoped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_backend: ContextVar[str] = ContextVar("kernel_core_backend", default="native")
_native_modules: list[Any] = []


def register_native(module: Any) -> Any:
    """Make a package's compiled module answer to `limit_isa`. It has to offer `limit_isa(str)` and `isa()`."""
    _native_modules.append(module)
    return module


@contextlib.contextmanager
def using(backend: str) -> Iterator[None]:
    """Run ops with `"reference"` (plain PyTorch) or `"native"` inside the block."""
    if backend not in ("reference", "native"):
        raise ValueError(f"backend: got {backend!r}, allowed are 'reference' and 'native'")
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def use_reference() -> bool:
    """True inside `using("reference")`."""
    return _backend.get() == "reference"


@contextlib.contextmanager
def limit_isa(name: str) -> Iterator[None]:
    """Run every loaded native module at `name` ('scalar', 'avx2', 'avx512', 'amx') or below inside the block."""
    before = [(module, module.isa()) for module in _native_modules]
    try:
        for module, _ in before:
            module.limit_isa(name)
        yield
    finally:
        for module, isa in before:
            module.limit_isa(isa)


def available_isas() -> list[str]:
    """The instruction sets that this CPU can run, lowest first."""
    from kernel_core import _native

    levels = ["scalar", "avx2", "avx512", "amx"]
    return levels[: levels.index(_native.best_isa()) + 1]


def unsupported(op: str, tensor: torch.Tensor, exists: str) -> NotImplementedError:
    """The error for an op that has no implementation on a device."""
    return NotImplementedError(f"{op} has no implementation for device '{tensor.device}'; what exists: {exists}")


_libraries: dict[str, torch.library.Library] = {}


def register_op(
    namespace: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> None:
    """Publish `implementation` as `torch.ops.<namespace>.<name>` with a fake for torch.compile.

    `schema` is a TorchScript operator schema, e.g. ``"rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"``.
    The package's own function stays the fast way in; the dispatcher adds some microseconds a call.
    """
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = torch.library.Library(namespace, "DEF")
    library.define(schema)
    name = schema.split("(", 1)[0].strip()
    library.impl(name, implementation, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
