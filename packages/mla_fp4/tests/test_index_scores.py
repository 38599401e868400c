"""Index scores: against the reference, exact where arithmetic is, and free of their tile's influence."""

import pytest
import torch

import mla_fp4
from kernel_core import limit_isa, using
from kernel_core.testing import (
    assert_bitwise,
    assert_close,
    assert_repeatable,
    assert_thread_invariant,
    at_page_end,
    each_isa,
)

# nano, mini, flash, and shapes that pad heads or take another path: heads, dim
SHAPES = [(4, 32), (8, 128), (32, 128), (1, 32), (3, 64), (16, 96), (33, 64), (64, 128)]


@each_isa()
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("packed", [True, False])
def test_matches_reference(isa, heads, dim, packed, index_case):
    case = index_case([3, 0, 1, 2], [0, 1, 70, 200, 129, 130], heads=heads, dim=dim, packed=packed)
    with using("reference"):
        expected = mla_fp4.index_scores(**case)
    with limit_isa(isa):
        scores = mla_fp4.index_scores(**case)
    assert_close(scores, expected, atol=1e-5 * dim, rtol=1e-5, max_diff=5e-6)
    assert torch.equal(scores.isneginf(), torch.arange(200) >= case["visible"].unsqueeze(1))


@each_isa()
@pytest.mark.parametrize("visible", [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 1025])
@pytest.mark.parametrize("rows_per_block", [64, 24])
def test_every_tail(isa, visible, rows_per_block, index_case):
    case = index_case([2], [visible - 1, visible], heads=8, dim=128, rows_per_block=rows_per_block)
    with using("reference"):
        expected = mla_fp4.index_scores(**case)
    with limit_isa(isa):
        assert_close(mla_fp4.index_scores(**case), expected, atol=1e-3, rtol=1e-5)


@each_isa()
@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (8, 128), (32, 128), (33, 64)])
@pytest.mark.parametrize("packed", [True, False])
def test_a_row_alone_equals_it_in_a_chunk(isa, heads, dim, packed, index_case, take_rows):
    """Rows of a chunk share decoded keys; tiles of one, two and many columns have to agree to the bit."""
    rows = 37
    case = index_case([rows], [150 + 3 * i for i in range(rows)], heads=heads, dim=dim, packed=packed)
    with limit_isa(isa):
        whole = mla_fp4.index_scores(**case)
        for part in (slice(0, 1), slice(17, 18), slice(35, 37), slice(5, 36)):
            scores = mla_fp4.index_scores(**take_rows(case, part))
            assert_bitwise(scores, whole[part, : scores.shape[1]].contiguous())
        assert_repeatable(lambda: mla_fp4.index_scores(**case), times=5)
        assert_thread_invariant(lambda: mla_fp4.index_scores(**case))


@each_isa()
def test_a_key_scores_the_same_at_every_position(isa, index_case):
    case = index_case([1], [200], heads=8, dim=128, packed=False)
    case["pages"][case["block_table"][0, :4].long()] = torch.randn(128)
    with limit_isa(isa):
        scores = mla_fp4.index_scores(**case)
    assert_bitwise(scores, scores[:, :1].repeat(1, 200))


@each_isa()
@pytest.mark.parametrize("heads", [4, 8, 32])
def test_exact_on_small_integers(isa, heads, index_case):
    """All products and sums are exact in float32 then, so every path has to give the same number."""
    case = index_case([3], [100, 101, 102], heads=heads, dim=32, packed=False)
    for name in ("q", "head_weights", "pages"):
        case[name] = torch.randint(-4, 5, case[name].shape).float().where(case[name].isfinite(), case[name])
    with using("reference"):
        expected = mla_fp4.index_scores(**case)
    pages = torch.zeros(len(case["pages"]), 64 * 17, dtype=torch.uint8)
    keys = case["pages"].nan_to_num().flatten(0, 1)
    keys[:, 0] = case["q"][..., 0] = 6  # the scale of every group is 1
    case["pages"] = keys.view(-1, 64, 32)
    with using("reference"):
        expected = mla_fp4.index_scores(**case)
    mla_fp4.store_index(mla_fp4.kv_rows(keys, None, 1, None, format="index"), pages, torch.arange(len(keys)), 64)
    with limit_isa(isa):
        assert torch.equal(mla_fp4.index_scores(**case), expected)
        assert torch.equal(mla_fp4.index_scores(**(case | {"pages": pages})), expected)


@each_isa()
@pytest.mark.parametrize("heads", [4, 33])
@pytest.mark.parametrize("packed", [True, False])
def test_unused_memory_is_never_read(isa, heads, packed, index_case):
    """Rows and blocks that nobody sees are NaN, ids behind the used ones are garbage, arrays end at a page's end."""
    case = index_case([1, 2], [65, 3, 130], heads=heads, dim=32, packed=packed)
    case |= {name: at_page_end(case[name]) for name in ("q", "head_weights", "pages", "block_table", "visible")}
    with limit_isa(isa):
        scores = mla_fp4.index_scores(**case)
    assert not scores.isnan().any()


@each_isa()
@pytest.mark.parametrize("heads", [4, 8, 32, 33])
def test_nan_keys_and_queries_stay_where_they_are(isa, heads, index_case):
    case = index_case([3], [100, 100, 100], heads=heads, dim=32)
    block = int(case["block_table"][0, 0])
    with limit_isa(isa):
        clean = mla_fp4.index_scores(**case)
        case["pages"][block, 64 * 16 + 7] = 255  # the scale of key 7
        scores = mla_fp4.index_scores(**case)
        assert scores[:, 7].isnan().all()
        assert_bitwise(scores[:, 8:].contiguous(), clean[:, 8:].contiguous())
        case["q"][1, 0, 3] = float("nan")
        assert_bitwise(mla_fp4.index_scores(**case)[[0, 2]], scores[[0, 2]])


@each_isa()
@pytest.mark.parametrize("packed", [True, False])
def test_empty_shapes(isa, packed, index_case):
    with limit_isa(isa):
        assert mla_fp4.index_scores(**index_case([0, 0], [], packed=packed)).shape == (0, 0)
        assert mla_fp4.index_scores(**index_case([2], [0, 0], packed=packed)).shape == (2, 0)


@pytest.mark.parametrize("backend", ["native"])
@pytest.mark.parametrize(
    ("name", "value", "argument"),
    [
        ("q", torch.zeros(3, 4, 32, dtype=torch.bfloat16), "q"),
        ("q", torch.zeros(3, 4, 48), "q"),
        ("q", torch.zeros(3, 0, 32), "q"),
        ("head_weights", torch.zeros(3, 5), "head_weights"),
        ("pages", torch.zeros(3, 64 * 17 + 1, dtype=torch.uint8), "pages"),
        ("pages", torch.zeros(3, 64, 33), "pages"),
        ("rows_per_block", 0, "rows_per_block"),
        ("block_table", torch.zeros(1, 2, dtype=torch.int64), "block_table"),
        ("block_table", torch.tensor([[0, 2**31 - 1]], dtype=torch.int32), r"block_table\[0, 1\]"),
        ("block_table", torch.tensor([[-1, 0]], dtype=torch.int32), r"block_table\[0, 0\]"),
        ("block_table", torch.tensor([[1]], dtype=torch.int32), r"visible\[0\]"),
        ("cu_seqlens", torch.tensor([0, 2], dtype=torch.int32), r"cu_seqlens\[1\]"),
        ("cu_seqlens", torch.tensor([0, 3, 3], dtype=torch.int32), "cu_seqlens"),
        ("visible", torch.tensor([100, 100, -1], dtype=torch.int32), r"visible\[2\]"),
        ("visible", torch.tensor([100, 100, 100]), "visible"),
    ],
)
def test_bad_input_names_the_argument(backend, name, value, argument, index_case):
    case = index_case([3], [100, 100, 100])
    with using(backend), pytest.raises(ValueError, match=f"^{argument}: got .*, allowed is "):
        mla_fp4.index_scores(**(case | {name: value}))
