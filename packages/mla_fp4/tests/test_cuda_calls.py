"""From ops to the compiled module: every call fits its binding, with CPU tensors in the place of a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernel_core.cuda
from kernel_core.testing.bindings import FakeModule, bindings
from mla_fp4.cuda import attention, indexer, rows

CSRC = Path(__file__).parents[1] / "csrc" / "cuda"


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(
        CSRC,
        {
            "index_score_workspace": 64,
            "index_topk_workspace": 80,
            "topk_slices": 2,
            "topk_workspace": 48,
        },
    )
    for user in (attention, indexer, rows):
        monkeypatch.setattr(user, "cuda_module", lambda _: module)
        monkeypatch.setattr(user, "stream", lambda _: 77)
        monkeypatch.setattr(user, "multiprocessors", lambda _: 132, raising=False)
    return module


def only(fake, name):
    found = [arguments for called, arguments in fake.calls if called == name]
    assert len(found) == 1
    return found[0]


def batch(heads, dtype=torch.float32, selected=64):
    one = torch.zeros(2, dtype=torch.int64)
    return {
        "q": torch.randn(3, heads, 512).to(dtype),
        "new_rows": torch.zeros(3, 528, dtype=torch.uint8),
        "ring": torch.zeros(4, 134, 528, dtype=torch.uint8),
        "ring_slot": torch.ones(2, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 1, 3], dtype=torch.int32),
        "start_pos": one,
        "lower": one,
        "window": 128,
        "pages": torch.zeros(5, 64, 288, dtype=torch.uint8),
        "rows_per_block": 64,
        "block_table": torch.zeros(2, 7, dtype=torch.int32),
        "indices": torch.zeros(3, selected, dtype=torch.int32),
        "sink": torch.zeros(heads),
        "rope": torch.zeros(3, 64),
        "scale": 0.5,
    }


def test_the_bindings_are_found():
    known = bindings(CSRC)
    assert {"sparse_attention", "norm_rope", "kv_rows", "store_rows", "compress", "index_score", "topk"} <= set(known)
    assert known["topk"]["workspace"] and not known["topk"]["scores"]


@pytest.mark.parametrize("heads", [1, 4, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_attention(fake, heads, dtype, given):
    case = batch(heads, dtype)
    out = torch.empty(3, heads, 512, dtype=dtype) if given else None
    result = attention.sparse_attention(**case, out=out)
    assert result.shape == (3, heads, 512) and result.dtype == dtype and result.is_contiguous()
    assert out is None or result is out
    call = only(fake, "sparse_attention")
    sizes = {
        "rows": 3, "heads": heads, "batch": 2, "slots": 4, "ring_rows": 134, "window": 128, "blocks": 5,
        "rows_per_block": 64, "table_width": 7, "selected": 64, "multiprocessors": 132, "stream": 77, "scale": 0.5,
    }  # fmt: skip
    assert {name: call[name] for name in sizes} == sizes
    for name in ("new_rows", "ring", "pages", "block_table", "indices", "cu_seqlens", "rope"):
        assert call[name] == case[name].data_ptr(), name
    direct = dtype == torch.bfloat16
    assert (call["q"] == case["q"].data_ptr()) == direct
    assert not given or (call["out"] == out.data_ptr()) == direct


def test_attention_over_the_window_alone(fake):
    case = batch(4) | {"pages": None, "block_table": None, "indices": None}
    attention.sparse_attention(**case)
    call = only(fake, "sparse_attention")
    assert all(call[name] == 0 for name in ("pages", "block_table", "indices", "blocks", "table_width", "selected"))


def test_nothing_to_do_calls_nothing(fake):
    case = batch(4)
    for name in ("q", "new_rows", "rope", "indices"):
        case[name] = case[name][:0]
    assert attention.sparse_attention(**case).shape == (0, 4, 512)
    rows.norm_rope(torch.empty(0, 64), None, 1.0, None, inverse=False, out=None)
    empty = torch.empty(0, 36, dtype=torch.uint8)
    rows.store_rows(empty, empty, torch.empty(0).long(), code_bytes=36, scale_bytes=0, rows_per_block=0, capacity=0)
    assert fake.calls == []


def test_rows(fake):
    x, weight, rope = torch.randn(6, 2, 64), torch.rand(64), torch.zeros(6, 16)
    assert rows.norm_rope(x, weight, 1e-6, rope, inverse=True, out=x) is x
    call = only(fake, "norm_rope")
    assert (call["rows"], call["group"], call["d"], call["rope_dim"], call["inverse"]) == (6, 2, 64, 16, True)
    flat = x[:, 0].contiguous()
    made = rows.kv_rows(flat, None, 1.0, rope, number=2, width=34, dtype=torch.uint8, round_bf16=False)
    assert made.shape == (6, 34) and only(fake, "kv_rows")["format"] == 2
    pages, slots = torch.zeros(2, 34 * 4, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)
    rows.store_rows(made, pages, slots, code_bytes=32, scale_bytes=2, rows_per_block=4, capacity=8)
    assert only(fake, "store_rows")["rows_address"] == made.data_ptr()
    tail, cu, start = torch.zeros(3, 7, 2, 64), torch.tensor([0, 6]).int(), torch.tensor([1])
    assert rows.compress(flat, flat, tail, cu[:1], cu, start, 4).shape == (4, 64)
    call = only(fake, "compress")
    assert (call["batch"], call["rows"], call["d"], call["slots"], call["ring"], call["groups"]) == (1, 6, 64, 3, 7, 4)


def index_batch(count=5, width=3):
    return {
        "q": torch.randn(count, 8, 128),
        "head_weights": torch.randn(count, 8),
        "pages": torch.zeros(4, 64 * 68, dtype=torch.uint8),
        "rows_per_block": 64,
        "block_table": torch.zeros(2, width, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 2, count], dtype=torch.int32),
        "visible": torch.ones(count, dtype=torch.int32),
    }


NO_BLOCKS = {"candidates": None, "candidate_block": 8, "publish_blocks": 0}


def test_index(fake):
    """Without candidates and blocks, one call that bounds its scores itself."""
    case = index_batch()
    indices, blocks = indexer.index_topk(**case, k=16, longest=3, **NO_BLOCKS)
    assert indices.shape == (5, 16) and blocks is None
    assert [name for name, _ in fake.calls] == ["index_topk_workspace", "index_topk"]
    size, call = only(fake, "index_topk_workspace"), only(fake, "index_topk")
    assert size == {"rows": 5, "heads": 8, "width": 192, "k": 16, "scores": 1 << 28}
    assert (call["rows"], call["heads"], call["width"], call["longest_request"]) == (5, 8, 192, 3)
    assert (call["batch"], call["k"], call["workspace_bytes"], call["out"]) == (2, 16, 80, indices.data_ptr())
    assert call["q"] == case["q"].data_ptr() and "candidates" not in call
    fake.calls.clear()
    none = indexer.index_topk(**index_batch(0) | {"cu_seqlens": torch.zeros(3).int()}, k=16, longest=3, **NO_BLOCKS)
    assert none[0].shape == (0, 16) and fake.calls == []


def test_index_publishes_blocks_from_the_maxima(fake):
    _, blocks = indexer.index_topk(**index_batch(), k=16, longest=None, **NO_BLOCKS | {"publish_blocks": 7})
    (_, score), (_, first), (_, second) = (c for c in fake.calls if c[0] in ("index_score", "topk"))
    assert score["maxima"] == second["scores"] and score["maxima_stride"] == second["stride"] == 24
    assert (second["width"], second["k"], second["keep_last"]) == (24, 7, True)
    assert second["out"] == blocks.data_ptr() and first["width"] == 192 and score["longest_request"] == 5
    assert (first["k"], first["slices"], first["keep_last"], first["scores"]) == (16, 2, False, score["scores"])
    assert (score["width"], score["stride"], score["batch"]) == (192, 192, 2)


def test_index_among_candidates(fake):
    ids = torch.zeros(5, 6, dtype=torch.int32)
    indexer.index_topk(**index_batch(), k=16, longest=1, **NO_BLOCKS | {"candidates": ids})
    score, best = only(fake, "index_score"), only(fake, "topk")
    assert score["candidates"] == best["blocks"] == ids.data_ptr()
    assert score["width"] == best["width"] == 48 and best["block"] == score["candidate_block"] == 8
    assert best["blocks_width"] == score["candidates_width"] == 6


def test_index_takes_rows_in_parts_when_scores_grow(fake, monkeypatch):
    monkeypatch.setattr(indexer, "_SCORES", 2 * 192)
    case = index_batch()
    indexer.index_topk(**case, k=16, longest=3, **NO_BLOCKS | {"publish_blocks": 4})
    parts = [c for name, c in fake.calls if name == "index_score"]
    assert [c["rows"] for c in parts] == [2, 2, 1] and [c["longest_request"] for c in parts] == [2, 2, 1]
    assert parts[1]["q"] == case["q"][2:].data_ptr()


def test_fits():
    case = batch(4)
    assert attention.fits(case["q"], case["ring"], 128, 512, case["rope"])
    assert not attention.fits(case["q"], case["ring"], 129, 512, case["rope"])
    assert not attention.fits(case["q"][..., :64], case["ring"], 32, 512, case["rope"])
    assert not attention.fits(case["q"], case["ring"].float(), 128, 512, case["rope"])
    index = index_batch()
    assert indexer.fits_scores(index["q"], index["pages"], 64)
    assert not indexer.fits_scores(index["q"], index["pages"], 48)
    assert not indexer.fits_scores(index["q"][..., :64], index["pages"], 64)
    assert indexer.fits_topk(512, 1 << 20, 8, 2048, None) and not indexer.fits_topk(512, 1 << 20, 4, 64, None)
    assert not indexer.fits_topk(4096, 1 << 20, 8, 0, None) and not indexer.fits_topk(512, (1 << 20) + 1, 8, 0, None)
    assert not indexer.fits_topk(512, 64, 8, 0, torch.zeros(1, 0, dtype=torch.int32))
    x = torch.randn(4, 512)
    assert rows.fits_kv_rows(x, None, torch.zeros(4, 64)) and not rows.fits_kv_rows(x[:, :48], None, None)
    assert rows.fits_norm_rope(x, None, torch.zeros(4, 64), None)
    assert not rows.fits_norm_rope(x[:, :60], None, None, None)
    assert not rows.fits_norm_rope(x, None, torch.zeros(4, 0), None)
    assert rows.fits_compress(x, x, torch.zeros(1, 7, 2, 512)) and not rows.fits_compress(x[:, :6], x, x[None, :, None])


def test_tensors_of_two_devices_are_refused(fake):
    case = batch(4)
    case["ring"] = case["ring"].to("meta")
    with pytest.raises(ValueError, match="ring: got a tensor on meta, allowed is cpu"):
        attention.sparse_attention(**case)
    assert fake.calls == []


def test_a_package_without_kernels_says_what_to_do():
    kernel_core.cuda.cuda_module.cache_clear()
    with pytest.raises(RuntimeError, match="FATHOM_CUDA=ON"):
        kernel_core.cuda.cuda_module("kernel_core")
