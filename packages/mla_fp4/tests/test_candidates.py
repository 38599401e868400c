"""Candidate blocks: what the full layer publishes, and what the layers that use it choose."""

import pytest
import torch

import mla_fp4
from kernel_core import limit_isa, using
from kernel_core.testing import assert_bitwise, each_isa, poison
from mla_fp4.reference.indexer import publish_blocks

BLOCK = 8


def padded(ids, width):
    return ids + [-1] * (width - len(ids))


def best_blocks(scores, visible, count):
    """The definition, in words: rank blocks by their best visible score, the newest block first of all."""
    blocks = range(-(-visible // BLOCK))
    top = [max(scores[b * BLOCK : min((b + 1) * BLOCK, visible)].tolist()) for b in blocks]
    if top:
        top[-1] = float("inf")
    order = sorted(blocks, key=lambda b: (-top[b], b != len(top) - 1, b))
    return padded(sorted(order[:count]), count)


@each_isa()
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_publishes_the_best_blocks(isa, packed, count, index_case):
    visible = [0, 1, 7, 8, 9, 63, 64, 200, 201, 239]
    case = index_case([4, 6], visible, heads=8, dim=64, packed=packed)
    with limit_isa(isa):
        scores = mla_fp4.index_scores(**case)
        _, blocks = mla_fp4.index_topk(**case, k=4, publish_blocks=count)
    assert_bitwise(publish_blocks(scores, case["visible"], BLOCK, count), blocks)
    for row, n in enumerate(visible):
        assert blocks[row].tolist() == best_blocks(scores[row], n, count)


@each_isa()
def test_all_blocks_while_they_fit(isa, index_case):
    case = index_case([3], [0, 40, 64])
    with limit_isa(isa):
        _, blocks = mla_fp4.index_topk(**case, k=4, publish_blocks=8)
    assert blocks.tolist() == [padded([], 8), padded([0, 1, 2, 3, 4], 8), list(range(8))]


@each_isa()
@pytest.mark.parametrize("block", [4, 8, 64])
@pytest.mark.parametrize("packed", [True, False])
def test_restriction_chooses_inside_only(isa, block, packed, index_case):
    visible = [300, 64, 301, 5, 0]
    case = index_case([1, 4], visible, heads=8, dim=64, packed=packed)
    blocks = -(-301 // block)
    lists = [sorted(torch.randperm(blocks)[: max(1, blocks // 3)].tolist()) for _ in visible]
    width = max(map(len, lists)) + 1
    candidates = torch.tensor([padded(ids, width) for ids in lists], dtype=torch.int32)
    with limit_isa(isa):
        scores = mla_fp4.index_scores(**case)
        indices, _ = mla_fp4.index_topk(**case, k=24, candidates=candidates, candidate_block=block)
    for row, n in enumerate(visible):
        inside = [p for b in lists[row] for p in range(b * block, (b + 1) * block) if p < n]
        chosen = sorted(sorted(inside, key=lambda p: (-scores[row, p].item(), p))[:24])
        assert indices[row].tolist() == padded(chosen, 24)
    with using("reference"):
        expected, _ = mla_fp4.index_topk(**case, k=24, candidates=candidates, candidate_block=block)
    differing = (expected != indices).float().mean()
    assert differing < 0.05  # the reference rounds its sums in another order


@each_isa()
@pytest.mark.parametrize("packed", [True, False])
def test_published_blocks_without_loss_equal_no_restriction(isa, packed, index_case):
    """While every block fits, the consumer's choice is that of an unrestricted layer, bit for bit."""
    case = index_case([5], [90, 91, 92, 93, 94], heads=32, dim=128, packed=packed)
    with limit_isa(isa):
        free, blocks = mla_fp4.index_topk(**case, k=16, publish_blocks=12)
        restricted, _ = mla_fp4.index_topk(**case, k=16, candidates=blocks)
    assert_bitwise(restricted, free)


@each_isa()
def test_other_blocks_are_not_read(isa, index_case):
    case = index_case([1], [256], rows_per_block=64)
    blocks = case["block_table"][0].clone()
    poison(case["pages"][int(blocks[1])])
    poison(case["pages"][int(blocks[2])])
    candidates = torch.tensor([[0, 7, 24, 31, 40, -1]], dtype=torch.int32)  # 40 lies beyond the visible positions
    with limit_isa(isa):
        indices, _ = mla_fp4.index_topk(**case, k=64, candidates=candidates)
    expected = [*range(8), *range(56, 64), *range(192, 200), *range(248, 256)]
    assert indices[0].tolist() == padded(expected, 64)


@each_isa()
def test_no_candidates(isa, index_case):
    case = index_case([2], [100, 100])
    with limit_isa(isa):
        for candidates in (torch.full((2, 3), -1, dtype=torch.int32), torch.empty(2, 0, dtype=torch.int32)):
            indices, _ = mla_fp4.index_topk(**case, k=4, candidates=candidates)
            assert (indices == -1).all()


@each_isa()
def test_newest_block_stays_with_the_worst_score(isa, index_case):
    case = index_case([1], [201], heads=4, packed=False)
    case["head_weights"].abs_()
    case["pages"][case["block_table"][0, 3].long(), 8] = 0  # position 200, alone in its block, scores zero
    with limit_isa(isa):
        _, blocks = mla_fp4.index_topk(**case, k=1, publish_blocks=3)
    assert blocks[0, -1] == 25
