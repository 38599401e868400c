"""The public ops with tensors on an NVIDIA GPU: the reference's results, and no waiting for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing import assert_bitwise, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@contextlib.contextmanager
def no_waiting():
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(case):
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in case.items()}


def run(op, case, **options):
    """What `op` gives on the GPU."""
    device = on_gpu(case)
    op(**device, **options)  # loads and warms up
    with no_waiting():
        return op(**device, **options)


def expected(op, case, **options):
    with using("reference"):
        return op(**case, **options)


@pytest.mark.parametrize("shape", [(5, 512), (5, 4, 512), (3, 64), (2, 3, 20)])
@pytest.mark.parametrize("inverse", [False, True])
def test_norm_rope(shape, inverse):
    d = shape[-1]
    case = {"x": torch.randn(shape), "weight": torch.rand(d), "eps": 1e-6, "rope": torch.randn(shape[0], d // 4 * 2)}
    result = run(mla_fp4.norm_rope, case, inverse=inverse)
    assert_close(result.cpu(), expected(mla_fp4.norm_rope, case, inverse=inverse), atol=2e-6, rtol=4e-6)
    x = case["x"].cuda()
    assert mla_fp4.norm_rope(x, None, 1.0, case["rope"].cuda(), out=x) is x


@pytest.mark.parametrize("format", ["main", "window", "index"])
@pytest.mark.parametrize("d", [32, 96, 512])
def test_kv_rows(format, d):
    """Without a norm every product is exact or rounded once, so the bytes agree; 96 channels have no kernel."""
    case = {"x": torch.randn(9, d), "weight": None, "eps": 1.0, "rope": None}
    result = run(mla_fp4.kv_rows, case, format=format)
    assert_bitwise(result.cpu(), expected(mla_fp4.kv_rows, case, format=format))
    result = run(mla_fp4.kv_rows, case, format=format, quantize=False)
    assert_bitwise(result.cpu(), case["x"])


@pytest.mark.parametrize("kind", ["main", "float", "index", "float index"])
def test_stores(kind):
    slots = torch.tensor([5, -1, 0, 7, -1, 9])
    if kind.startswith("float"):
        rows, pages = torch.randn(6, 64), torch.randn(2, 5, 64)
    else:
        rows, pages = (torch.randint(0, 256, s).to(torch.uint8) for s in ((6, 68), (2, 5, 68)))
    op, options = (
        (mla_fp4.store_main, {}) if kind in ("main", "float") else (mla_fp4.store_index, {"rows_per_block": 5})
    )
    if kind == "index":
        pages = pages.view(2, -1)
    target, device, moved = pages.clone(), rows.cuda(), slots.cuda()
    with using("reference"):
        op(rows, target, slots, **options)
    for backend in ("native", "library"):
        changed = pages.cuda()
        with using(backend), no_waiting():
            op(device, changed, moved, **options)
        assert_bitwise(changed.cpu(), target)


@pytest.mark.parametrize("d", [512, 6])
def test_compress(d):
    lengths, starts = [0, 5, 1, 0, 12], [3, 4, 9, 7, 1]
    cu, start = torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(starts)
    case = {
        "kv": torch.randn(18, d), "gate": torch.randn(18, d), "tail": torch.randn(6, 7, 2, d),
        "tail_slot": torch.randperm(6)[:5].int(), "cu_seqlens": cu, "start_pos": start,
    }  # fmt: skip
    device = on_gpu(case)
    result = expected(mla_fp4.compress, case)
    with no_waiting():
        actual = mla_fp4.compress(**device, groups=len(result) + 2)
    assert_close(actual[:-2].cpu(), result, atol=2e-6, rtol=4e-6)
    assert not actual[-2:].any()
    assert_bitwise(device["tail"].cpu(), case["tail"])
    with pytest.raises(ValueError, match="groups: got None"):
        mla_fp4.compress(**device)


def attention_case(heads, dim=512, window=128, rope=64, packed=True, selected=200, rows_per_block=64):
    lengths, starts = [3, 0, 1], [0, 5, 300]
    blocks, rows = 8, sum(lengths)
    indices = torch.stack([torch.randperm(7 * rows_per_block)[:selected].sort().values for _ in range(rows)]).int()
    indices[torch.rand(rows, selected) < 0.2] = -1
    near, far = (formats.quantize_window, formats.quantize_main) if packed else (lambda x: x, lambda x: x)
    return {
        "q": torch.randn(rows, heads, dim),
        "new_rows": near(torch.randn(rows, dim)),
        "ring": near(torch.randn(4, window + 6, dim)),
        "ring_slot": torch.tensor([2, 0, 3]).int(),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "start_pos": torch.tensor(starts),
        "lower": torch.tensor([0, 0, 250]),
        "window": window,
        "pages": far(torch.randn(blocks, rows_per_block, dim)),
        "rows_per_block": rows_per_block,
        "block_table": torch.stack([torch.randperm(7) + 1 for _ in lengths]).int(),
        "indices": indices,
        "sink": torch.randn(heads),
        "rope": torch.randn(rows, rope),
        "scale": dim**-0.5,
    }


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 19, 32, 33, 40, 64, 65, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_attention(heads, dtype):
    case = attention_case(heads)
    case["q"] = case["q"].bfloat16().float()
    result = expected(mla_fp4.sparse_attention, case)
    actual = run(mla_fp4.sparse_attention, {**case, "q": case["q"].to(dtype)})
    assert actual.dtype == dtype
    assert_close(actual.float().cpu(), result, atol=6e-3, rtol=2.01 / 128, max_diff=5e-6)
    out = torch.full_like(case["q"], torch.nan).to(dtype).cuda()
    device = on_gpu({**case, "q": case["q"].to(dtype)})
    assert mla_fp4.sparse_attention(**device, out=out) is out
    assert_bitwise(out, actual)


@pytest.mark.parametrize("changes", [{"dim": 64, "window": 32, "rope": 16}, {"packed": False}, {"window": 200}])
def test_sparse_attention_without_a_kernel(changes):
    case = attention_case(4, **changes)
    actual = run(mla_fp4.sparse_attention, case)
    assert_close(actual.cpu(), expected(mla_fp4.sparse_attention, case), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "dim", "block"), [(8, 128, 8), (64, 128, 8), (4, 32, 8), (8, 128, 4)]
)  # the last two have no kernel
def test_index_topk(index_case, heads, dim, block):
    case = index_case([1, 0, 3, 40], [700, 0, 1, 900, *range(500, 540)], heads=heads, dim=dim)
    (indices, blocks) = expected(mla_fp4.index_topk, case, k=64, candidate_block=block, publish_blocks=32)
    actual = run(mla_fp4.index_topk, case, k=64, candidate_block=block, publish_blocks=32)
    for ours, theirs in zip(actual, (indices, blocks), strict=True):  # sums in another order may swap near ties
        assert ours.dtype == torch.int32 and (ours.cpu() == theirs).float().mean() > 0.98
    hinted = mla_fp4.index_topk(**on_gpu(case), k=64, candidate_block=block, publish_blocks=32, longest=40)
    assert all(torch.equal(a, b) for a, b in zip(hinted, actual, strict=True))
    among = expected(mla_fp4.index_topk, case, k=64, candidates=blocks, candidate_block=block)[0]
    device = on_gpu(case) | {"candidates": blocks.cuda()}
    with no_waiting():
        ours = mla_fp4.index_topk(**device, k=64, candidate_block=block)[0]
    assert (ours.cpu() == among).float().mean() > 0.98


@pytest.mark.parametrize("dim", [128, 32])
def test_index_scores(index_case, dim):
    case = index_case([2, 1], [70, 65, 200], dim=dim)
    result, actual = expected(mla_fp4.index_scores, case), run(mla_fp4.index_scores, case).cpu()
    width = result.shape[1]
    assert (actual[:, width:] == -torch.inf).all()
    assert_close(actual[:, :width], result, atol=1e-4, rtol=1e-5)


def test_ops_stand_in_a_graph(index_case):
    """Capture, change the inputs, replay: what the ops give eagerly."""
    attention, index = on_gpu(attention_case(4)), on_gpu(index_case([1, 1], [300, 200], heads=8, dim=128))

    def step():
        found = mla_fp4.index_topk(**index, k=64, publish_blocks=16)
        return mla_fp4.sparse_attention(**attention), *found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    attention["q"].normal_()
    index["q"].normal_()
    graph.replay()
    for recorded, eager in zip(results, step(), strict=True):
        assert_bitwise(recorded, eager)


def test_tensors_of_two_devices_are_refused():
    case = on_gpu(attention_case(4))
    with pytest.raises(ValueError, match="ring: got a tensor on cpu"):
        mla_fp4.sparse_attention(**{**case, "ring": case["ring"].cpu()})
