"""Where a kernel runs, and running it: on an NPU, or, only when asked, in host emulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch

from cann_ops.errors import CannUnavailableError, NotLoweredError
from cann_ops.kernels import Kernel
from cann_ops.lowering import Lowered, lower
from kernel_core import use_reference

_emulate: ContextVar[bool] = ContextVar("cann_ops_host_emulation", default=False)


@contextlib.contextmanager
def host_emulation() -> Iterator[None]:
    """Run kernels on CPU tensors inside the block: their AscendC compiled with g++, checked, slow. For tests.

    Needs tilelang and g++. It shows numbers and races under our reading of the device, never its speed.
    """
    token = _emulate.set(True)
    try:
        yield
    finally:
        _emulate.reset(token)


def place(op: str, tensor: torch.Tensor) -> str:
    """What an op runs for a tensor: "reference", "emulation" or "npu".

    Raises CannUnavailableError where nothing of it can be had; no other device is taken in silence.
    """
    if use_reference():
        return "reference"
    if tensor.device.type == "npu":
        from cann_ops.runtime.available import require_npu

        require_npu(op)
        return "npu"
    if tensor.is_cpu and _emulate.get():
        return "emulation"
    raise CannUnavailableError(
        f"{op}: got a tensor on {tensor.device}, allowed is an Ascend NPU (cann_ops.is_available() says what is "
        "missing); on a CPU, ask for kernel_core.using('reference') or for cann_ops.host_emulation()"
    )


def launch(
    kernel: Kernel,
    tensors: Mapping[str, torch.Tensor],
    *,
    written: Sequence[str],
    scalars: Mapping[str, int | float] | None = None,
) -> None:
    """Run a kernel on contiguous tensors by the names of its program; those that it has no parameter for are ignored.

    `written` names the results that hold nothing before. Dynamic sizes are read from the tensors' shapes unless they
    stand in `scalars`.
    """
    lowered = lower(kernel)
    names = {p.name for p in lowered.parameters}
    given = {name: tensor for name, tensor in tensors.items() if name in names}
    numbers: dict[str, int | float] = {k: v for k, v in (scalars or {}).items() if k in names}
    for name, (tensor, axis) in lowered.sizes.items():
        if name in names:
            numbers.setdefault(name, int(given[tensor].shape[axis]))
    if next(iter(given.values())).is_cpu:
        _run_on_host(lowered, given, [name for name in written if name in names], numbers)
        return
    from cann_ops.runtime import npu

    npu.run(lowered, given, numbers)


def _run_on_host(
    lowered: Lowered, given: dict[str, torch.Tensor], written: list[str], numbers: dict[str, int | float]
) -> None:
    """Every byte of a result has to be written, with a value that follows from the arguments."""
    from cann_ops.emulate import UndefinedError, run_lowered
    from cann_ops.emulate.build import templates_dir

    if templates_dir() is None:
        raise NotLoweredError(
            f"{lowered.kernel}: emulation compiles against TileLang's headers; pip install 'cann_ops[lower]'"
        )
    simt = "__simt_vf__" in lowered.source
    report = run_lowered(lowered, given, undefined=written, scalars=numbers, threads_read_undefined=simt)
    for name in written:
        missing = report.defined[name].size - int(report.defined[name].sum())
        if missing:
            raise UndefinedError(f"{lowered.kernel}: {missing} bytes of {name} are not defined after the run")
