"""Every byte of a result is written, and none beside it: results are allocated poisoned, between guard bytes."""

import pytest
import torch

import mla_fp4
from kernel_core import limit_isa
from kernel_core.testing import Guarded, each_isa


@pytest.fixture
def guarded(monkeypatch):
    """Replaces torch.empty; gives the list of what was allocated."""
    made, plain = [], torch.empty

    def empty(*shape, dtype=torch.float32, **other):
        if other or not shape or not isinstance(shape[0], int):  # of the tests' own helpers
            return plain(*shape, dtype=dtype, **other)
        with monkeypatch.context() as context:
            context.setattr(torch, "empty", plain)  # which the guard itself calls
            made.append(Guarded(shape, dtype))
        return made[-1].tensor

    monkeypatch.setattr(torch, "empty", empty)
    yield made
    assert made
    for result in made:
        result.check()


@each_isa()
@pytest.mark.parametrize("rows", [0, 1, 3, 50])
@pytest.mark.parametrize(("format", "d"), [("main", 64), ("window", 512), ("index", 128)])
def test_cache_rows(isa, rows, format, d, guarded):
    x = torch.randn(rows, d)
    with limit_isa(isa):
        packed = mla_fp4.kv_rows(x, torch.ones(d), 1e-6, None, format=format)
        plain = mla_fp4.kv_rows(x, torch.ones(d), 1e-6, None, format=format, quantize=False)
    assert packed.shape[0] == rows
    assert not plain.isnan().any()


@each_isa()
@pytest.mark.parametrize("d", [33, 64, 512])
def test_pooled_rows(isa, d, guarded):
    x = torch.randn(9, d)
    batch = (torch.zeros(1, dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32), torch.tensor([1]))
    with limit_isa(isa):
        assert not mla_fp4.compress(x, x, torch.zeros(1, 7, 2, d), *batch).isnan().any()


@each_isa()
@pytest.mark.parametrize("heads", [4, 8, 32, 33])
@pytest.mark.parametrize("packed", [True, False])
def test_indices_blocks_and_scores(isa, heads, packed, index_case, guarded):
    visible = [0, 1, 15, 16, 17, 63, 64, 65, 100, 130]
    case = index_case([3, 7], visible, heads=heads, dim=64, packed=packed)
    with limit_isa(isa):
        indices, blocks = mla_fp4.index_topk(**case, k=20, publish_blocks=5)
        scores = mla_fp4.index_scores(**case)
    assert ((indices >= 0).sum(1) == case["visible"].clamp(max=20)).all()
    assert ((blocks >= 0).sum(1) == (case["visible"] + 7).div(8, rounding_mode="floor").clamp(max=5)).all()
    assert not scores.isnan().any()
