"""Index scores and their best positions in emulation against the reference."""

from __future__ import annotations

import pytest
import torch

import cann_ops
from cann_ops.reference import indexer as reference
from kernel_core import formats
from kernel_core.testing import assert_bitwise


def paged(heads, rows_per_block, visible, requests):
    """Arguments of `index_scores`: rows of `requests`, NaN bytes in every page that no row reaches."""
    blocks, width = 9, 4
    pages = torch.full((blocks, rows_per_block * 68), 0xFF, dtype=torch.uint8)
    table = torch.stack([torch.randperm(blocks)[:width] for _ in requests]).int()
    rows = sum(requests)
    cu = torch.tensor([0, *torch.tensor(requests).cumsum(0).tolist()], dtype=torch.int32)
    for b, row in enumerate(table):
        longest = max([0, *visible[int(cu[b]) : int(cu[b + 1])]])
        for page in row[: -(-longest // rows_per_block)].tolist():
            keys = formats.quantize_index(torch.randn(1, rows_per_block, 128) * 3)
            pages[page] = formats.index_page_from_rows(keys)[0]
    q, weights = torch.randn(rows, heads, 128), torch.randn(rows, heads)
    return q, weights, pages, rows_per_block, table, cu, torch.tensor(visible, dtype=torch.int32)


@pytest.mark.parametrize("heads, rows_per_block", [(32, 64), pytest.param(32, 128, marks=pytest.mark.slow)])
def test_scores_are_the_references(emulated, heads, rows_per_block):
    visible = [4 * rows_per_block, 1, 0, 3 * rows_per_block + 5, rows_per_block - 1]
    arguments = paged(heads, rows_per_block, visible, [2, 0, 3])
    found, expected = cann_ops.index_scores(*arguments), reference.index_scores(*arguments)
    assert torch.equal(found.isinf(), expected.isinf())
    finite = ~expected.isinf()
    assert torch.allclose(found[finite], expected[finite], rtol=1e-5, atol=1e-4)


def test_a_score_does_not_depend_on_its_batch(emulated):
    q, weights, pages, rows_per_block, table, cu, visible = paged(32, 64, [200, 130, 64], [1, 2])
    whole = cann_ops.index_scores(q, weights, pages, rows_per_block, table, cu, visible)
    one = (q[2:].contiguous(), weights[2:].contiguous(), pages, rows_per_block, table[1:].contiguous())
    alone = cann_ops.index_scores(*one, torch.tensor([0, 1]).int(), visible[2:].contiguous())
    assert_bitwise(alone, whole[2:, :64].contiguous())


@pytest.mark.parametrize("k, width", [(512, 20_000), (8, 300), (64, 65), (5, 3), (1, 1)])
def test_the_best_are_chosen_with_their_ties(emulated, k, width):
    scores = torch.randn(9, width)
    scores[1] = scores[1].round()
    scores[2], scores[3] = torch.nan, -torch.inf
    scores[4], scores[4, ::2] = 0.0, -0.0
    scores[5, ::3] = torch.nan
    scores[6] = scores[6].round() * 1e-40
    scores[7, width // 2] = torch.inf
    visible = torch.full((9,), width, dtype=torch.int32)
    visible[0], visible[7], visible[8] = max(0, width - 3), min(k, width), 0
    assert_bitwise(cann_ops.select_top(scores, visible, k), reference.select_top(scores, visible, k))


def test_topk_is_scores_then_choice(emulated):
    arguments = paged(32, 64, [200, 3, 100], [2, 1])
    indices, blocks = cann_ops.index_topk(*arguments, 16)
    scores = cann_ops.index_scores(*arguments)
    assert blocks is None
    assert_bitwise(indices, reference.select_top(scores, arguments[-1], 16))


def test_candidates_have_no_kernel():
    arguments = paged(32, 64, [5], [1])
    with pytest.raises(NotImplementedError, match="candidates"):
        cann_ops.index_topk(*arguments, 4, publish_blocks=2)
