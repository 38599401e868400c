"""From the router's and the products' ops to the compiled module: every call fits its binding, with CPU tensors in the
place of a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernel_core
from kernel_core.testing.bindings import FakeModule
from mega_moe.cuda import linear, route
from mega_moe.ops import dense, routing

CSRC = Path(__file__).parents[1] / "csrc" / "cuda"


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(CSRC, {"linear_shape": (4, 16, 8), "permute_workspace": 48})
    for user in (linear, route):
        monkeypatch.setattr(user, "cuda_module", lambda _: module)
        monkeypatch.setattr(user, "stream", lambda _: 77)
    monkeypatch.setattr(linear, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(kernel_core, "elsewhere", lambda *_, **__: "cuda")
    return module


def test_router(fake):
    logits, bias = torch.zeros(5, 12), torch.zeros(12)
    ids, weights = routing.route(logits, bias, 3)
    name, call = fake.calls[-1]
    assert name == "route" and call["ids"] == ids.data_ptr() and call["bias_vl"] == 0 == call["is_image"]
    assert ids.shape == weights.shape == (5, 3) and call["weights"] == weights.data_ptr()
    routing.route(logits, bias, 3, bias_vl=bias, is_image=torch.zeros(5, dtype=torch.bool), routed_scale=2.5)
    assert fake.calls[-1][1]["bias_vl"] == bias.data_ptr() and fake.calls[-1][1]["scale"] == 2.5
    count = len(fake.calls)
    assert routing.route(logits[:0], bias, 3)[0].shape == (0, 3)
    assert len(fake.calls) == count


def test_permutation(fake):
    ids = torch.zeros(5, 3, dtype=torch.int32)
    made = route.permute(ids, 12, shared=True)
    assert made.offsets.shape == (14,) and made.rows.shape == (20,)
    assert fake.calls[-1][0] == "permute" and fake.calls[-1][1]["shared"]
    ticket = route.new_ticket(torch.device("cpu"))
    *_, made = route.route_permute(torch.zeros(5, 12), torch.zeros(12), 3, ticket)
    assert made.offsets.shape == (13,) and made.rows.shape == (15,)
    assert fake.calls[-1][1]["ticket"] == ticket.data_ptr()
    assert route.fits_one_launch(341, 6) and not route.fits_one_launch(342, 6) and not route.fits_one_launch(0, 6)


def test_products(fake):
    weight = torch.zeros(64, 128).to(torch.float8_e4m3fn)
    scale = torch.zeros(2, 4, dtype=torch.uint8)
    out = dense.linear(torch.zeros(3, 128), weight, scale)
    name, call = fake.calls[-1]
    assert name == "linear" and (call["tokens"], call["groups"], call["rows"], call["columns"]) == (3, 1, 64, 128)
    assert call["out"] == out.data_ptr() and (call["terms"], call["tile"], call["cluster"]) == (3, 16, 1)
    out = dense.grouped_linear(torch.zeros(3, 2, 128), weight, scale)
    call = fake.calls[-1][1]
    assert out.shape == (3, 2, 32) and (call["groups"], call["rows"]) == (2, 32)
    dense.linear(torch.zeros(64, 128), weight, scale, reproducible=False)
    assert fake.calls[-1][1]["tokens"] == 64
    count = len(fake.calls)
    dense.linear(torch.zeros(65, 128), weight, scale, reproducible=False)  # PyTorch's product
    dense.linear(torch.zeros(3, 96), weight[:, :96].contiguous(), scale[:, :3].contiguous())  # no whole chunks
    dense.linear(torch.zeros(0, 128), weight, scale)
    dense.linear(torch.zeros(3, 128), weight.float())
    assert len(fake.calls) == count


def test_ctas_follow_the_columns():
    assert [linear.cluster(n) for n in (64, 128, 256, 448, 512, 1024, 5120)] == [1, 1, 1, 1, 1, 2, 8]
