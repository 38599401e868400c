"""What a GPU runs where no kernel takes the shapes, on the CPU: equal to the reference, and deaf to padding."""

from __future__ import annotations

import pytest
import torch

import mla_fp4
from kernel_core import using
from kernel_core.testing import assert_bitwise, assert_close


def both(call):
    """Results of the reference and of the library path."""
    results = []
    for backend in ("reference", "library"):
        with using(backend):
            results.append(call())
    return results


@pytest.mark.parametrize(
    ("lengths", "starts"), [([1], [0]), ([1, 1, 1], [3, 4, 9]), ([0, 5, 0, 12, 1, 0], [3, 4, 0, 7, 1, 2]), ([9], [1])]
)
@pytest.mark.parametrize("ring", [1, 2, 7])
@pytest.mark.parametrize("spare", [0, 3])
def test_compress(lengths, starts, ring, spare):
    rows = sum(lengths)
    cu, start = torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(starts)
    slot = torch.randperm(len(lengths) + 1)[: len(lengths)].int()
    kv, gate, tail = torch.randn(rows, 8), torch.randn(rows, 8), torch.randn(len(lengths) + 1, ring, 2, 8)
    tails = [tail.clone(), tail.clone()]
    with using("reference"):
        expected = mla_fp4.compress(kv, gate, tails[0], slot, cu, start)
    with using("library"):
        actual = mla_fp4.compress(kv, gate, tails[1], slot, cu, start, groups=len(expected) + spare)
    assert_close(actual[: len(expected)], expected, atol=1e-6, rtol=1e-6, max_diff=1e-10)
    assert not actual[len(expected) :].any() and len(actual) == len(expected) + spare
    assert_bitwise(tails[1], tails[0])


def test_compress_counts_itself_on_the_cpu_and_refuses_a_wrong_count():
    arguments = (torch.randn(3, 8), torch.randn(3, 8), torch.zeros(1, 7, 2, 8), torch.zeros(1).int())
    arguments += (torch.tensor([0, 3]).int(), torch.tensor([0]))
    with using("library"):
        assert len(mla_fp4.compress(*arguments)) == 1
    assert len(mla_fp4.compress(*arguments, groups=1)) == 1
    with pytest.raises(ValueError, match="groups: got 2, allowed is 1"):
        mla_fp4.compress(*arguments, groups=2)


@pytest.mark.parametrize("slots", [[], [-1, -1], [4, -1, 0], [-1, 3, 5, 0, -1, 9]])
@pytest.mark.parametrize("kind", ["main", "float", "index"])
def test_stores(slots, kind):
    slots = torch.tensor(slots, dtype=torch.int64)
    count = len(slots)
    if kind == "float":
        rows, pages = torch.randn(count, 6), torch.randn(2, 5, 6)
    else:
        rows = torch.randint(0, 256, (count, 34), dtype=torch.uint8)
        pages = torch.randint(0, 256, (2, 5, 34), dtype=torch.uint8)
    found = []
    for backend in ("reference", "library"):
        target = pages.clone()
        with using(backend):
            if kind == "index":
                mla_fp4.store_index(rows, target.view(2, -1), slots, 5)
            else:
                mla_fp4.store_main(rows, target, slots)
        found.append(target)
    assert_bitwise(found[1], found[0])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("k", "block", "published"), [(4, 4, 3), (64, 8, 12), (7, 8, 1)])
def test_index(index_case, packed, k, block, published):
    case = index_case([1, 0, 3, 2], [60, 0, 1, 99, 130, 131], packed=packed)
    scores = both(lambda: mla_fp4.index_scores(**case))
    width = scores[0].shape[1]
    assert_close(scores[1][:, :width], scores[0], atol=1e-5, rtol=1e-5)
    assert (scores[1][:, width:] == -torch.inf).all()
    (indices, blocks), found = both(
        lambda: mla_fp4.index_topk(**case, k=k, candidate_block=block, publish_blocks=published)
    )
    assert_bitwise(found[0], indices)
    assert_bitwise(found[1], blocks)
    again, found = both(lambda: mla_fp4.index_topk(**case, k=k, candidates=blocks, candidate_block=block, longest=3))
    assert_bitwise(found[0], again[0])
    assert again[1] is None and found[1] is None


@pytest.mark.parametrize("inverse", [False, True])
def test_norm_rope_and_rows(inverse):
    x, weight, rope = torch.randn(5, 3, 64), torch.rand(64), torch.randn(5, 16)
    expected, actual = both(lambda: mla_fp4.norm_rope(x, weight, 1e-6, rope, inverse=inverse))
    assert_bitwise(actual, expected)
    out = x.clone()
    with using("library"):
        assert mla_fp4.norm_rope(out, weight, 1e-6, rope, inverse=inverse, out=out) is out
    assert_bitwise(out, expected)
    for format in ("main", "window", "index"):
        expected, actual = both(lambda: mla_fp4.kv_rows(x[:, 0].contiguous(), weight, 1e-6, rope, format=format))  # noqa: B023
        assert_bitwise(actual, expected)
