"""`using("triton")` takes the Triton kernels, for the ops that have one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import mla_fp4
from kernel_core import using


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins that note their arguments, as Triton may not be there."""
    seen = {}
    for name, op in (("triton_attention", "sparse_attention"), ("triton_index", "index_scores")):
        module = ModuleType(f"mla_fp4.{name}")
        setattr(module, op, lambda *a, op=op, **k: seen.setdefault(op, (a, k))[0][0])
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(mla_fp4, name, module, raising=False)
    return seen


def test_index_scores(kernels, index_case):
    case = index_case([1], [70])
    with using("triton"):
        assert mla_fp4.index_scores(**case) is case["q"]
        assert mla_fp4.index_topk(**case, k=4)[0].shape == (1, 4)  # has none: the compiled code runs
    assert [a is b for a, b in zip(kernels["index_scores"][0], case.values(), strict=True)] == [True] * 7
    mla_fp4.index_scores(**case)
    assert len(kernels) == 1


def test_attention(kernels):
    one = torch.zeros(1, dtype=torch.int64)
    q, out, two = torch.randn(2, 4, 64), torch.empty(2, 4, 64), torch.tensor([0, 2]).int()
    arguments = (
        q, torch.zeros(2, 66).byte(), torch.zeros(1, 40, 66).byte(), one.int(), two, one, one, 32,
        torch.zeros(1, 8, 36).byte(), 8, torch.zeros(1, 1).int(), torch.zeros(2, 3).int(), torch.zeros(4),
        torch.zeros(2, 16), 0.1,
    )  # fmt: skip
    with using("triton"):
        assert mla_fp4.sparse_attention(*arguments, out=out) is q
    given, named = kernels["sparse_attention"]
    assert len(given) == 15 and given[0] is q and given[14] == 0.1 and named == {"out": out}
