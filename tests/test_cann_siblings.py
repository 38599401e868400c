"""cann_ops' references stand alone; here they are held equal to those of the packages whose counterparts they are."""

from __future__ import annotations

import pytest
import torch

import cann_ops.reference.attention as own_attention
import cann_ops.reference.experts as own_experts
import cann_ops.reference.indexer as own_indexer
import cann_ops.reference.rows as own_rows
import cann_ops.reference.streams as own_streams
import mega_moe.reference as moe
import mhc_engram.reference as streams
import mla_fp4.reference.attention as attention
import mla_fp4.reference.indexer as indexer
import mla_fp4.reference.rows as rows
import swa_replay.reference as window
from kernel_core import formats
from kernel_core.testing import assert_bitwise
from mega_moe import SharedExpert


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("format, d", [("main", 512), ("window", 512), ("index", 128)])
@pytest.mark.parametrize("round_bf16", [False, True])
def test_rows(format, d, round_bf16):
    x, weight, angles = torch.randn(9, d), torch.rand(d), torch.rand(9, 32)
    rope = torch.cat([angles.cos(), angles.sin()], 1)
    x[1], x[2, 3] = 0, torch.nan
    for w, r in ((weight, rope), (None, rope), (weight, None), (None, None)):
        options = {"format": format, "round_bf16": round_bf16}
        assert_bitwise(own_rows.kv_rows(x, w, 1e-6, r, **options), rows.kv_rows(x, w, 1e-6, r, **options))


def test_stores():
    main = torch.randint(0, 256, (9, 288), dtype=torch.uint8)
    slots = torch.tensor([3, -1, 0, 7, 15, 8, -1, 1, 2])
    pages = torch.zeros(2, 8, 288, dtype=torch.uint8), torch.zeros(2, 8, 288, dtype=torch.uint8)
    own_rows.store_main(main, pages[0], slots)
    rows.store_main(main, pages[1], slots)
    assert_bitwise(*pages)
    index = torch.randint(0, 256, (9, 68), dtype=torch.uint8)
    keys = torch.zeros(2, 8 * 68, dtype=torch.uint8), torch.zeros(2, 8 * 68, dtype=torch.uint8)
    own_rows.store_index(index, keys[0], slots, 8)
    rows.store_index(index, keys[1], slots, 8)
    assert_bitwise(*keys)


def problem(heads=4):
    lengths, starts = [1, 5, 0, 3], [200, 0, 7, 66]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    total = int(cu[-1])
    angles = torch.rand(total, 32)
    return {
        "q": torch.randn(total, heads, 512),
        "new": formats.quantize_window(torch.randn(total, 512)),
        "ring": formats.quantize_window(torch.randn(5, 70, 512)),
        "slot": torch.tensor([4, 0, 1, 2], dtype=torch.int32),
        "cu": cu,
        "start": torch.tensor(starts),
        "lower": torch.tensor([150, 0, 0, 60]),
        "pages": formats.quantize_main(torch.randn(6, 16, 512)),
        "table": torch.stack([torch.randperm(6)[:3] for _ in lengths]).int(),
        "indices": torch.randint(-1, 48, (total, 11), dtype=torch.int32),
        "sink": torch.randn(heads),
        "rope": torch.cat([angles.cos(), angles.sin()], 1),
    }


def test_attention():
    p = problem()
    before = (p["q"], p["new"], p["ring"], p["slot"], p["cu"], p["start"], p["lower"], 60)
    after = (p["sink"], p["rope"], 0.05)
    middle = (p["pages"], 16, p["table"], p["indices"])
    close = {"rtol": 1e-5, "atol": 1e-6}
    found = own_attention.sparse_attention(*before, *middle, *after)
    torch.testing.assert_close(found, attention.sparse_attention(*before, *middle, *after), **close)
    found = own_attention.window_attention(*before, *after)
    torch.testing.assert_close(found, window.window_attention(*before, *after), **close)


def test_near_rows_are_the_window_keys():
    """The places that the kernel gathers hold the keys that the definition attends to."""
    from kernel_core.attention import window_keys

    p = problem()
    total = p["q"].shape[0]
    near = own_attention.near_rows(p["cu"], p["start"], p["lower"], 60, p["slot"], (5, 70), total)
    keys, seen = window_keys(p["new"], p["ring"], p["slot"], p["cu"], p["start"], p["lower"], 60)
    pool = formats.dequantize_window(torch.cat((p["ring"].flatten(0, 1), p["new"])))
    for t in range(total):
        assert_bitwise(pool[near[t][near[t] >= 0]], keys[t][seen[t]])


def test_rings():
    p = problem()
    floor = torch.tensor([0, 2, 0, 67])
    rings = p["ring"].clone(), p["ring"].clone()
    own_rows.store_window(p["new"], rings[0], p["slot"], p["cu"], p["start"], floor)
    window.store_window(p["new"], rings[1], p["slot"], p["cu"], p["start"], floor)
    assert_bitwise(*rings)


def test_indexer():
    pages = formats.index_page_from_rows(formats.quantize_index(torch.randn(6, 64, 128)))
    table = torch.stack([torch.randperm(6)[:3] for _ in range(3)]).int()
    visible = torch.tensor([192, 3, 0, 64, 65], dtype=torch.int32)
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    arguments = (torch.randn(5, 32, 128), torch.randn(5, 32), pages, 64, table, cu, visible)
    found, expected = own_indexer.index_scores(*arguments), indexer.index_scores(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    scores = expected.round()
    scores[3, 5] = torch.nan
    for k in (1, 8, 64, 192):
        assert_bitwise(own_indexer.select_top(scores, visible, k), indexer.select_top(scores, visible, k))


def test_router():
    logits = torch.randn(9, 40) * 5
    logits[0], logits[1, 3], logits[2] = torch.nan, torch.inf, -120.0
    bias, other, image = torch.randn(40), torch.randn(40), torch.rand(9) < 0.5
    for options in ({}, {"bias_vl": other, "is_image": image}):
        for mine, theirs in zip(
            own_experts.route(logits, bias, 6, **options), moe.route(logits, bias, 6, **options), strict=True
        ):
            assert_bitwise(mine, theirs)


def test_experts_are_the_same_up_to_the_rounding_of_activations():
    import cann_ops
    import kernel_core

    x, ids = torch.randn(7, 1024), torch.randint(-1, 3, (7, 2), dtype=torch.int32)
    w13, s13 = formats.quantize_mxfp4(torch.randn(3, 512, 1024) * 0.1)
    w2, s2 = formats.quantize_mxfp4(torch.randn(3, 1024, 256) * 0.1)
    arguments = (x, ids, torch.rand(7, 2), w13, s13, w2, s2)
    pairs = (formats.quantize_fp8_block(torch.randn(*shape) * 0.1) for shape in ((512, 1024), (1024, 256)))
    for shared in (None, SharedExpert(*(part for pair in pairs for part in pair))):
        with kernel_core.using("reference"):
            found = cann_ops.fused_experts(*arguments, shared=shared)
            alone = cann_ops.fused_experts(x, ids[:, :0], torch.rand(7, 0), w13, s13, w2, s2, shared=shared)
        expected = moe.fused_experts(*arguments, shared=shared)
        assert float((found - expected).norm() / expected.norm()) < 0.06
        assert bool(alone.any()) == (shared is not None)


def test_streams():
    X, y, post, comb = torch.randn(5, 4, 64), torch.randn(5, 64), torch.rand(5, 4), torch.rand(5, 4, 4)
    fn, base, scale, weight = torch.randn(24, 256), torch.randn(24), torch.randn(3), torch.rand(64)
    for mine, theirs in zip(
        own_streams.hc_coefficients(X, fn, base, scale), streams.hc_coefficients(X, fn, base, scale), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for w in (None, weight):
        torch.testing.assert_close(own_streams.hc_mix(X, post, w), streams.hc_mix(X, post, w), rtol=1e-5, atol=1e-6)
    both = X.clone(), X.clone()
    own_streams.hc_update(both[0], y, post, comb)
    streams.hc_update(both[1], y, post, comb)
    assert_bitwise(*both)


def test_the_engine_names_what_an_npu_lacks(monkeypatch):
    import cann_ops
    from orchestrator.model.device import resolve_device

    with pytest.raises(ValueError, match=r"device: got 'npu', allowed are 'cpu' and 'cuda' here: torch_npu"):
        resolve_device("npu")
    monkeypatch.setattr(cann_ops, "is_available", lambda: (True, ""))
    with pytest.raises(ValueError, match="the engine does not run on cann_ops' kernels yet"):
        resolve_device("npu")
