"""Choosing a backend: compiled code, its instruction set, and the other implementations of an op.

No environment variable changes numerics. `using(...)` and `limit_isa(...)` are explicit and scoped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch  # before any compiled module, so that one OpenMP runtime is mapped

import kernel_core._native as _native

BACKENDS = ("native", "reference", "library", "triton")
_backend: ContextVar[str] = ContextVar("kernel_core_backend", default="native")
_native_modules: list[Any] = []


def register_native(module: Any) -> Any:
    """Make a package's compiled module answer to `limit_isa`. It has to offer `limit_isa(str)` and `isa()`."""
    _native_modules.append(module)
    return module


register_native(_native)


@contextlib.contextmanager
def using(backend: str) -> Iterator[None]:
    """Run ops with another implementation inside the block.

    "native": compiled code, the default: C++ for CPU tensors, CUDA C++ for those on an NVIDIA GPU. A GPU op without a
    kernel for its shapes, or without any, runs as under "library".
    "library": PyTorch's operators on the tensors' device, without reading a value back to the host, so that a CUDA
    graph can hold them. On CPU tensors too.
    "triton": the Triton kernel of an op that has one; other ops run as under "native". CPU tensors need Triton's
    interpreter.
    "reference": the plain definition, for tests.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, allowed are {', '.join(map(repr, BACKENDS))}")
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def use_reference() -> bool:
    """True inside `using("reference")`."""
    return _backend.get() == "reference"


def elsewhere(op: str, tensor: torch.Tensor, *, kernels: bool = False, triton: bool = False) -> str:
    """What an op runs that is not the compiled CPU code: "cuda", "library" or "triton"; "" for the CPU code.

    `kernels`: the op has CUDA C++ kernels. `triton`: it has a Triton one. Raises NotImplementedError for a device that
    nothing is made for.
    """
    chosen = _backend.get()
    if chosen == "native" and tensor.is_cpu:  # first, since every op of every layer asks
        return ""
    if chosen == "library":
        return "library"
    if chosen == "triton" and triton:
        return "triton"
    if tensor.is_cpu:
        return ""
    if tensor.is_cuda:
        return "cuda" if kernels else "library"
    raise unsupported(op, tensor, "cpu and cuda")


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
