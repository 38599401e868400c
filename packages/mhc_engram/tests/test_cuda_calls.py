"""From ops to the compiled module: every call fits its binding, with CPU tensors in the place of a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_core.testing.bindings import FakeModule
from mhc_engram import cuda
from mhc_engram.ops import engram, hyper_connection

CSRC = Path(__file__).parents[1] / "csrc" / "cuda"


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(CSRC, {"hc_shape": (8, 3)})
    monkeypatch.setattr(cuda, "cuda_module", lambda _: module)
    monkeypatch.setattr(cuda, "stream", lambda _: 77)
    monkeypatch.setattr(cuda, "multiprocessors", lambda _: 132)
    for ops in (engram, hyper_connection):
        monkeypatch.setattr(ops, "elsewhere", lambda *_, **__: "cuda")
    return module


def last(fake):
    return fake.calls[-1]


def test_hyper_connections(fake, make_step):
    step = make_step(5, 64)
    X, y, post, comb, fn, base, scale, pre, weight = step.arguments()
    x, *made = hyper_connection.hc_step(X, y, post, comb, fn, base, scale, pre, weight, iters=7)
    name, call = last(fake)
    assert name == "hc_step" and call["streams"] == X.data_ptr() and call["mixed"] == x.data_ptr()
    assert [call[k] for k in ("pre_out", "post_out", "comb_out")] == [t.data_ptr() for t in made]
    assert call["iters"] == 7 and (call["cluster"], call["tile"]) == (8, 3)
    hyper_connection.hc_step(X, None, None, None, fn, base, scale, pre, None, coefficients=(pre, post, comb))
    assert last(fake)[1]["y"] == 0 and last(fake)[1]["pre_out"] == pre.data_ptr() == last(fake)[1]["pre_mix"]
    hyper_connection.hc_update(X, y, post, comb)
    assert last(fake)[1]["fn"] == 0 == last(fake)[1]["pre_mix"] and last(fake)[1]["comb"] == comb.data_ptr()
    hyper_connection.hc_coefficients(X, fn, base, scale)
    assert last(fake)[1]["y"] == 0 == last(fake)[1]["mixed"] and last(fake)[1]["fn"] == fn.data_ptr()
    out = torch.empty(5, 64)
    assert hyper_connection.hc_mix(X, pre, weight, out=out) is out
    assert last(fake)[1]["mixed"] == out.data_ptr() and last(fake)[1]["norm_weight"] == weight.data_ptr()
    count = len(fake.calls)
    hyper_connection.hc_update(X[:0], y[:0], post[:0], comb[:0])
    assert len(fake.calls) == count


def test_engram(fake):
    rows = engram.engram_rows(
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(1, 2, dtype=torch.int64),
        torch.tensor([0, 4], dtype=torch.int32),
        torch.ones(3, dtype=torch.int64),
        torch.ones(6, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int64),
        9,
    )
    name, call = last(fake)
    assert name == "engram_rows" and rows.shape == (4, 6) and (call["orders"], call["heads"]) == (2, 3)
    X, kv, weight = torch.zeros(4, 4, 32), torch.zeros(4, 160), torch.zeros(4, 32)
    engram.engram_inject(X, kv, weight)
    assert last(fake)[0] == "engram_inject" and last(fake)[1]["dead"] == 0
    table, scale = torch.zeros(10, 64).to(torch.float8_e4m3fn), torch.zeros(10, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^table: got memory that is not pinned"):
        engram.engram_gather(table, scale, rows)
