"""torch.ops.mla_fp4: the same results through the dispatcher, shapes without data for the compiler."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fp4
from kernel_core.testing import assert_bitwise


def test_results_are_those_of_the_functions(index_case):
    x, weight, rope = torch.randn(3, 64), torch.rand(64), torch.randn(3, 16)
    ops = torch.ops.mla_fp4
    assert_bitwise(
        ops.norm_rope(x, weight, 1e-6, rope, inverse=True), mla_fp4.norm_rope(x, weight, 1e-6, rope, inverse=True)
    )
    rows = ops.kv_rows(x, weight, 1e-6, rope, format="window")
    assert_bitwise(rows, mla_fp4.kv_rows(x, weight, 1e-6, rope, format="window"))
    pages = torch.zeros(1, 4, 66, dtype=torch.uint8)
    ops.store_main(rows, pages, torch.tensor([2, -1, 0]))
    assert_bitwise(pages[0, 2], rows[0])
    index_pages = torch.zeros(1, 4 * 34, dtype=torch.uint8)
    ops.store_index(mla_fp4.kv_rows(x, None, 1e-6, None, format="index"), index_pages, torch.tensor([0, 1, 2]), 4)
    assert index_pages.any()
    case = index_case([2], [90, 91])
    indices, blocks = ops.index_topk(*case.values(), 8)
    assert_bitwise(indices, mla_fp4.index_topk(**case, k=8)[0])
    assert blocks.shape == (2, 0)
    assert_bitwise(ops.index_scores(*case.values()), mla_fp4.index_scores(**case))
    batch = (torch.zeros(1, dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1]))
    pooled = ops.compress(x, x, torch.zeros(1, 7, 2, 64), *batch)
    assert_bitwise(pooled, mla_fp4.compress(x, x, torch.zeros(1, 7, 2, 64), *batch))


def test_fakes_give_shapes():
    with FakeTensorMode():
        x = torch.empty(3, 512)
        assert torch.ops.mla_fp4.norm_rope(x, None, 1e-6, None).shape == (3, 512)
        assert torch.ops.mla_fp4.kv_rows(x, None, 1e-6, None).shape == (3, 288)
        assert torch.ops.mla_fp4.kv_rows(x, None, 1e-6, None, quantize=False).dtype == torch.float32
        int32 = torch.empty(4, dtype=torch.int32)
        indices, blocks = torch.ops.mla_fp4.index_topk(
            torch.empty(4, 8, 128),
            torch.empty(4, 8),
            torch.empty(2, 64, 128),
            64,
            int32.view(1, 4),
            int32[:2],
            int32,
            9,
        )
        assert indices.shape == (4, 9) and blocks.shape == (4, 0)


def test_other_devices_are_named(index_case):
    x = torch.empty(2, 64, device="meta")
    case = {name: value.to("meta") if torch.is_tensor(value) else value for name, value in index_case([1], [9]).items()}
    pages, slots = torch.empty(1, 4, 64, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    tail, cu = torch.empty(1, 7, 2, 64, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    for op, call in {
        "norm_rope": lambda: mla_fp4.norm_rope(x, None, 1e-6, None),
        "kv_rows": lambda: mla_fp4.kv_rows(x, None, 1e-6, None),
        "store_main": lambda: mla_fp4.store_main(x, pages, slots),
        "store_index": lambda: mla_fp4.store_index(x, pages, slots, 4),
        "compress": lambda: mla_fp4.compress(x, x, tail, cu[:1], cu, slots[:1]),
        "index_topk": lambda: mla_fp4.index_topk(**case, k=4),
        "index_scores": lambda: mla_fp4.index_scores(**case),
    }.items():
        with pytest.raises(
            NotImplementedError, match=rf"mla_fp4\.{'store_main' if op == 'store_index' else op} .*'meta'"
        ):
            call()
