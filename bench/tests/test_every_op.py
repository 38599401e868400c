"""Every op that a kernel package registers can be timed by name."""

from __future__ import annotations

import importlib

import pytest
import torch

from bench.discover import discover

PACKAGES = ("mla_fp4", "swa_replay", "mega_moe", "mhc_engram", "dspark_kernels")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_registered_op_has_a_bench(package):
    importlib.import_module(package)
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"{package}::")}
    assert names, "the package registers no op"
    timed = {entry.bench.op for entry in discover().entries}
    assert {name.replace("::", ".") for name in names} - timed == set()
