"""The best positions: exactly those of the op's own scores, ties to the lower one, ascending."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_fp4
from kernel_core import limit_isa, using
from kernel_core.testing import assert_bitwise, assert_repeatable, assert_thread_invariant, each_isa
from mla_fp4.reference.indexer import select_top


def one_hot_case(scores):
    """A problem whose scores are the given float32 vector: one head, keys (s, 0, 0, ...) and query (1, 0, ...).

    The weight's sign carries negative numbers: head 0 sees max(s, 0), head 1 max(-s, 0).
    """
    n = len(scores)
    blocks = -(-n // 64) or 1
    pages = torch.zeros(blocks, 64, 32)
    pages.view(-1, 32)[:n, 0] = scores
    q = torch.zeros(1, 2, 32)
    q[0, 0, 0], q[0, 1, 0] = 1, -1
    return {
        "q": q,
        "head_weights": torch.tensor([[1.0, -1.0]]),
        "pages": pages,
        "rows_per_block": 64,
        "block_table": torch.arange(blocks, dtype=torch.int32).view(1, -1),
        "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
        "visible": torch.tensor([n], dtype=torch.int32),
    }


def best(scores, k):
    """The definition: order by score, then by position."""
    value = [-float("inf") if s != s else s for s in scores.tolist()]
    chosen = sorted(sorted(range(len(value)), key=lambda i: (-value[i], i))[:k])
    return chosen + [-1] * (k - len(chosen))


@each_isa()
@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (8, 128), (32, 128), (33, 64)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("k", [1, 16, 64, 500])
def test_chooses_by_its_own_scores(isa, heads, dim, packed, k, index_case):
    case = index_case([3, 0, 1, 2], [0, 1, 70, 300, 129, 130], heads=heads, dim=dim, packed=packed)
    with limit_isa(isa):
        scores = mla_fp4.index_scores(**case)
        indices, blocks = mla_fp4.index_topk(**case, k=k)
    assert blocks is None
    assert_bitwise(indices, select_top(scores, case["visible"], k))
    for row in range(6):
        assert indices[row].tolist() == best(scores[row, : case["visible"][row]], k)


@each_isa()
@pytest.mark.parametrize(
    "kind", ["random", "ascending", "descending", "equal", "few values", "last", "nan", "infinite"]
)
@pytest.mark.parametrize(("n", "k"), [(1, 4), (64, 64), (65, 64), (3000, 1), (3000, 37), (5000, 512), (9001, 2048)])
def test_hard_orders(isa, kind, n, k):
    scores = {
        "random": lambda: torch.randn(n),
        "ascending": lambda: torch.arange(n).float(),
        "descending": lambda: -torch.arange(n).float(),
        "equal": lambda: torch.full((n,), 2.5),
        "few values": lambda: torch.randint(0, 3, (n,)).float(),
        "last": lambda: (torch.arange(n) >= n - k).float(),
        "nan": lambda: torch.where(torch.rand(n) < 0.5, torch.nan, torch.randn(n)),
        "infinite": lambda: torch.where(torch.rand(n) < 0.01, torch.inf, torch.randn(n)),
    }[kind]()
    case = one_hot_case(scores)
    with limit_isa(isa):
        ranked = mla_fp4.index_scores(**case)[0]
        indices, _ = mla_fp4.index_topk(**case, k=k)
    if kind not in ("nan", "infinite"):  # an infinite key meets zeros in the other channels
        assert torch.equal(ranked, scores)
    assert indices[0].tolist() == best(ranked, k)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-38, -1e-38, 3.0, float("nan")]), min_size=1, max_size=300
    ),
    k=st.integers(1, 80),
)
def test_selection_over_ties_and_special_values(values, k):
    case = one_hot_case(torch.tensor(values))
    ranked = mla_fp4.index_scores(**case)[0]
    indices, _ = mla_fp4.index_topk(**case, k=k)
    with using("reference"):
        assert_bitwise(mla_fp4.index_topk(**case, k=k)[0], indices)
    assert indices[0].tolist() == best(ranked, k)


def test_reference_selection_is_the_definition():
    scores = torch.randint(-3, 4, (20, 50)).float()
    scores[torch.rand(20, 50) < 0.1] = float("nan")
    counts = torch.randint(0, 51, (20,))
    chosen = select_top(scores, counts, 7)
    for row in range(20):
        assert chosen[row].tolist() == best(scores[row, : counts[row]], 7)


@each_isa()
@pytest.mark.parametrize("packed", [True, False])
def test_a_row_alone_equals_it_in_a_chunk(isa, packed, index_case, take_rows):
    rows = 40
    case = index_case([rows], [100 + 5 * i for i in range(rows)], heads=8, dim=128, packed=packed)
    with limit_isa(isa):
        whole = mla_fp4.index_topk(**case, k=32, publish_blocks=6)
        for part in (slice(0, 1), slice(21, 22), slice(3, 40)):
            for alone, together in zip(
                mla_fp4.index_topk(**take_rows(case, part), k=32, publish_blocks=6), whole, strict=True
            ):
                assert_bitwise(alone, together[part].contiguous())
        assert_repeatable(lambda: mla_fp4.index_topk(**case, k=32, publish_blocks=6), times=5)
        assert_thread_invariant(lambda: mla_fp4.index_topk(**case, k=32, publish_blocks=6))


def test_rounds_do_not_show():
    """More scores than the buffer of one round holds."""
    rows, n = 600, 20_000  # 12 million scores, the buffer takes 8
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (-(-n // 64) + 1, 64 * 17), dtype=torch.uint8, generator=generator)
    pages[:, 64 * 16 :] = 127
    case = {
        "q": torch.randn(rows, 4, 32, generator=generator),
        "head_weights": torch.randn(rows, 4, generator=generator),
        "pages": pages,
        "rows_per_block": 64,
        "block_table": torch.arange(len(pages), dtype=torch.int32).view(1, -1),
        "cu_seqlens": torch.tensor([0, rows], dtype=torch.int32),
        "visible": torch.full((rows,), n, dtype=torch.int32),
    }
    indices, _ = mla_fp4.index_topk(**case, k=8)
    for row in (0, 419, 420, 599):
        part = {name: case[name][row : row + 1] for name in ("q", "head_weights", "visible")}
        alone, _ = mla_fp4.index_topk(**(case | part | {"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}), k=8)
        assert_bitwise(alone[0], indices[row])


@each_isa()
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_nothing_visible_and_no_rows(isa, backend, index_case):
    with limit_isa(isa), using(backend):
        indices, blocks = mla_fp4.index_topk(**index_case([2], [0, 0]), k=5, publish_blocks=3)
        assert (indices == -1).all() and indices.shape == (2, 5)
        assert (blocks == -1).all() and blocks.shape == (2, 3)
        assert mla_fp4.index_topk(**index_case([0], []), k=5)[0].shape == (0, 5)


@each_isa()
def test_nan_ranks_last_and_harms_no_other(isa, index_case):
    case = index_case([2], [200, 200])
    case["pages"][case["block_table"][0, 1].long(), 64 * 16 :] = 255  # keys 64 to 127
    with limit_isa(isa):
        indices, _ = mla_fp4.index_topk(**case, k=100)
        assert not ((indices >= 64) & (indices < 128)).any()
        everything, _ = mla_fp4.index_topk(**case, k=200)
    assert_bitwise(everything, torch.arange(200, dtype=torch.int32).repeat(2, 1))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"k": 0}, "k"),
        ({"publish_blocks": -1}, "publish_blocks"),
        ({"candidate_block": 0}, "candidate_block"),
        ({"candidates": torch.zeros(1, 2, dtype=torch.int32)}, "candidates"),
        ({"candidates": torch.zeros(2, 2, dtype=torch.int64)}, "candidates"),
        ({"candidates": torch.tensor([[0, 1], [1, 1]], dtype=torch.int32)}, r"candidates\[1, 1\]"),
        ({"candidates": torch.zeros(2, 1, dtype=torch.int32), "publish_blocks": 2}, "publish_blocks"),
    ],
)
def test_bad_input_names_the_argument(change, argument, index_case):
    with pytest.raises(ValueError, match=f"^{argument}: got .*, allowed is "):
        mla_fp4.index_topk(**(index_case([2], [100, 100]) | {"k": 4} | change))
