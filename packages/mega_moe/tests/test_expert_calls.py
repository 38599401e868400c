"""From the op to the compiled module, with CPU tensors in the place of a GPU's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import kernel_core
import mega_moe
from kernel_core.testing.bindings import FakeModule
from mega_moe.cuda import choice, experts, layout, widen
from mega_moe.ops.packed import pack_where_it_fits

CSRC = Path(__file__).parents[1] / "csrc" / "cuda"


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(CSRC, {"experts_sizes": (64, 64, 64, 64)})
    monkeypatch.setattr(experts, "cuda_module", lambda _: module)
    monkeypatch.setattr(experts, "stream", lambda _: 77)
    monkeypatch.setattr(experts, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(experts, "fits", lambda *_: True)
    order = torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    monkeypatch.setattr(experts, "permute", lambda *_, **__: order)
    monkeypatch.setattr(kernel_core, "elsewhere", lambda _, __, kernels=False: "cuda" if kernels else "library")
    return module


def arguments(weights):
    w13, s13 = (t.view(4, 512, -1) for t in weights.mxfp4(4 * 512, 256))
    w2, s2 = (t.view(4, 256, -1) for t in weights.mxfp4(4 * 256, 256))
    ids, gains = weights.routing(3, 4, 2)
    return weights.normal(3, 256), ids, gains, w13, s13, w2, s2


def test_packed_weights_choose_the_kernels(fake, weights):
    given = arguments(weights)
    packed = layout.pack_experts(*given[3:])
    out = torch.empty(3, 256)
    assert mega_moe.fused_experts(*given, packed=packed, out=out) is out
    calls = dict(fake.calls)["experts"]
    assert (calls["tokens"], calls["slots"], calls["d"], calls["inter"], calls["experts"]) == (3, 2, 256, 256, 4)
    assert calls["out"] == out.data_ptr() and calls["parts_of_work"] == 15
    assert calls["shared13"] == 0 and calls["ctas"] == 132 and calls["stream"] == 77


def test_few_rows_go_as_bfloat16(fake, weights):
    """Small tiles read rows where they lie; results stay float32."""
    given = arguments(weights)
    packed = layout.pack_experts(*given[3:])
    got = mega_moe.packed_experts(*given[:3], packed)
    calls = dict(fake.calls)["experts"]
    assert not calls["x_is_float"] and calls["out_is_float"] and got.dtype is torch.float32
    assert calls["columns"] == 8 and calls["variant"] == 0


def test_defaults_follow_the_measured_table():
    assert [experts.default_variant(e * rows, e, experts.token_tile(e * rows, e)) for e, rows in (
        (7, 1), (48, 1), (48, 16), (7, 32), (48, 32), (48, 256),
    )] == [0, 4, 2, 1, 0, 0]  # fmt: skip
    assert experts.default_variant(6, 384, 8) == 0  # six active ones


def test_packed_weights_alone(weights):
    """On a CPU: what the stored weights give, from nothing but the packed ones."""
    given = arguments(weights)
    shared = weights.shared(256, 256)
    packed = layout.pack_experts(*given[3:], shared)
    whole = mega_moe.fused_experts(*given, shared=shared)
    assert torch.equal(mega_moe.packed_experts(*given[:3], packed), whole)
    assert mega_moe.pack_for(torch.device("cpu"), *given[3:], shared) is None


@pytest.mark.parametrize("pooled", [False, True])
def test_slots_of_packed_weights(fake, weights, pooled):
    """Added up in the order of slots they are the whole; experts may stand anywhere; kernels are asked for no sum."""
    given = arguments(weights)
    x, ids, gains = given[:3]
    ids = ids.clone()
    ids[1] = torch.tensor([-1, 2], dtype=torch.int32)
    packed, places = layout.pack_experts(*given[3:], weights.shared(256, 256)), None
    whole = mega_moe.fused_experts(x, ids, gains, *given[3:])
    if pooled:
        places = torch.tensor([5, 1, 3, 0], dtype=torch.int32)
        wide = [torch.zeros(6, t.shape[1], dtype=torch.uint8) for t in (packed.w13, packed.w2)]
        for to, stored in zip(wide, (packed.w13, packed.w2), strict=True):
            to[places.long()] = stored
        packed = dataclasses.replace(packed, w13=wide[0], w2=wide[1])
    with kernel_core.using("reference"):  # else the fake module is asked
        parts = mega_moe.packed_slots(x, ids, gains, packed, places=places)
    assert parts.shape == (3, 2, 256)
    added = torch.where(ids[..., None] >= 0, parts, 0).sum(1)
    assert (added - whole).norm() < 1e-4 * whole.norm()
    got = mega_moe.packed_slots(x, ids, gains, packed, places=places)
    calls = dict(fake.calls)["experts"]
    assert calls["parts_of_work"] == 7 and calls["parts"] == got.data_ptr() and calls["shared13"] == 0
    assert calls["experts"] == 4 and calls["places"] == (places.data_ptr() if pooled else 0)
    with pytest.raises(ValueError, match="ids"):
        mega_moe.packed_slots(x, ids[:2], gains, packed, places=places)


@pytest.mark.parametrize("inter", [32, 64, 256, 288])
@pytest.mark.parametrize("with_shared", [False, True])
def test_few_hidden_channels_get_zeros(fake, weights, inter, with_shared):
    """Weights come back as they were; zeros beside them change an order of sums; kernels see the wider ones."""
    w13, s13 = (t.view(3, 2 * inter, -1) for t in weights.mxfp4(3 * 2 * inter, 256))
    w2, s2 = (t.view(3, 256, -1) for t in weights.mxfp4(3 * 256, inter))
    shared = weights.shared(256, inter) if with_shared else None
    packed = pack_where_it_fits(w13, s13, w2, s2, shared)
    wide = -(-inter // 256) * 256
    assert packed.inter == wide and getattr(packed, "stored", wide) == inter
    *got, same = widen.unpack_experts(packed)
    given = [w13, s13, w2, s2]
    if shared is not None:
        got, given = [*got, *same], [*given, shared.w13, shared.s13, shared.w2, shared.s2]
    for a, b in zip(got, given, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    ids, gains = weights.routing(5, 3, 2)
    x = weights.normal(5, 256)
    if wide != inter:
        whole = mega_moe.fused_experts(x, ids, gains, *given[:4], shared=shared)
        other = None if shared is None else mega_moe.SharedExpert(*widen.widen(*given[4:], wide))
        wider = mega_moe.fused_experts(x, ids, gains, *widen.widen(*given[:4], wide), shared=other)
        torch.testing.assert_close(wider, whole, atol=1e-5, rtol=1e-5)
    mega_moe.packed_experts(x, ids, gains, packed)
    assert dict(fake.calls)["experts"]["inter"] == wide


def test_without_them_the_library_runs(fake, weights):
    mega_moe.fused_experts(*arguments(weights))
    assert not fake.calls


def test_token_tiles_follow_the_average():
    assert [experts.token_tile(rows, 48) for rows in (1, 48 * 4, 48 * 5, 48 * 16, 48 * 60, 48 * 1024)] == [
        8, 8, 16, 32, 128, 128,
    ]  # fmt: skip


def test_a_table_chooses(tmp_path):
    fp8 = choice.Choice(128, fp8=True)
    table = choice.Table([8, 64], [choice.Choice(8), choice.Choice(64, 2)], [choice.Choice(8, 2), fp8])
    table.save(tmp_path / "table.json")
    again = choice.Table.load(tmp_path / "table.json")
    assert choice.choose(48 * 8, 48, again, reproducible=False) == choice.Choice(8, 2)
    assert choice.choose(48 * 9, 48, again, reproducible=False) == fp8
    assert choice.choose(48 * 1000, 48, again, reproducible=False) == fp8
    assert choice.choose(48 * 1000, 48, again, reproducible=True) == choice.Choice(64, 2)
    assert choice.choose(48 * 9, 48, None, reproducible=False) == choice.Choice(32)
    with pytest.raises(ValueError, match="bfloat16"):
        choice.Table([8], [fp8], [fp8])
