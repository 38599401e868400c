"""TileLang programs to source text and to machine code, without a GPU. Needs tilelang; machine code needs nvcc."""

from __future__ import annotations

from typing import Any

TARGETS = {"sm90": "sm_90a", "sm100": "sm_100a"}


def cuda_target(kind: str) -> Any:
    """The TileLang target of "sm90" or "sm100"."""
    from tilelang import tvm

    if kind not in TARGETS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(map(repr, TARGETS))}")
    return tvm.target.Target({"kind": "cuda", "arch": TARGETS[kind]})


def lower(program: Any, kind: str, *, machine_code: bool = False) -> str:
    """The CUDA C++ source of a program; with `machine_code` nvcc compiles it too, and errors are raised."""
    import tilelang

    target = cuda_target(kind)
    with target:
        return str(tilelang.lower(program, target=target, enable_device_compile=machine_code).kernel_source)


def lower_ascend(program: Any) -> str:
    """The AscendC source of a program for an Ascend 950."""
    import tilelang
    from tilelang import tvm
    from tilelang.backend.target import determine_target

    target = determine_target("ascend", return_object=True)
    with tvm.transform.PassContext(opt_level=3), target:
        done = tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
    return str(done.kernel_source)
