"""From tensors to the compiled module's arguments, with CPU tensors in the place of a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_core.testing.bindings import FakeModule
from mega_moe.cuda import layout, layout_fp8, prefill

CSRC = Path(__file__).parents[1] / "csrc" / "cuda"


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(CSRC, {"prefill_sizes": (64, 64, 64, 128, 128)})
    monkeypatch.setattr(prefill, "cuda_module", lambda _: module)
    monkeypatch.setattr(prefill, "stream", lambda _: 77)
    monkeypatch.setattr(prefill, "multiprocessors", lambda _: 132)
    return module


def arguments(weights, slots, pack=layout_fp8.pack_experts):
    w13, s13 = (t.view(4, 512, -1) for t in weights.mxfp4(4 * 512, 256))
    w2, s2 = (t.view(4, 256, -1) for t in weights.mxfp4(4 * 256, 256))
    ids, gains = weights.routing(3, 4, slots)
    order = torch.zeros(5, dtype=torch.int32), torch.zeros(3 * slots, dtype=torch.int32)
    return weights.normal(3, 256), ids, gains, pack(w13, s13, w2, s2), *order


def test_arguments(fake, weights):
    given = arguments(weights, 2)
    out = torch.empty(3, 256)
    assert prefill.experts(*given, limit=10.0, out=out) is out
    call = dict(fake.calls)["prefill"]
    assert (call["tokens"], call["slots"], call["d"], call["inter"], call["experts"]) == (3, 2, 256, 256, 4)
    assert call["x_is_float"] and call["parts_are_float"] and call["out"] == out.data_ptr() != call["parts"]
    assert (call["tile"], call["ctas"], call["steps"], call["stream"]) == (128, 132, prefill.ALL, 77)
    assert call["expanded13"] == call["expanded2"] == 0


def test_variants(fake, weights):
    given = arguments(weights, 1)
    prefill.experts(*given, limit=10.0, tile=64, expanded=True)
    call = dict(fake.calls)["prefill"]
    assert call["parts"] == call["out"] and call["expanded13"] and call["expanded2"]
    assert call["steps"] == prefill.ALL | prefill.EXPAND and call["tile"] == 64
    with pytest.raises(ValueError, match="tile"):
        prefill.experts(*given, limit=10.0, tile=32)


def test_bfloat16_activations(fake, weights):
    given = arguments(weights, 2, layout.pack_experts)
    prefill.experts(given[0].bfloat16(), *given[1:], limit=10.0)
    calls = dict(fake.calls)
    assert not calls["prefill_sizes"]["fp8"] and calls["prefill"]["parts_are_float"]
    assert calls["prefill"]["scale13"] == calls["prefill"]["scale2"] == 0
    with pytest.raises(ValueError, match="expanded"):
        prefill.experts(*given, limit=10.0, expanded=True)


def test_no_tokens_no_launch(fake, weights):
    x, ids, gains, *rest = arguments(weights, 2)
    prefill.experts(x[:0], ids[:0], gains[:0], *rest, limit=10.0)
    assert not fake.calls
