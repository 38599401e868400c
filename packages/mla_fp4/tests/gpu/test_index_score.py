"""Index scores on a GPU: equal to the host's run of the same arithmetic to the bit, and close to the reference."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest
import torch

import mla_fp4
from kernel_core import formats, using
from kernel_core.testing.host import address, host_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PACKAGE = Path(__file__).parents[2]
POISON = -12345.0


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    return host_library(
        PACKAGE / "tests/host/index_plan.cpp", tmp_path_factory.mktemp("index"), PACKAGE / "csrc/cuda/sm90"
    )


def index_score(case, *, candidates=None, candidate_block=8, maxima=False, fill=False, bf16=False, width=None):
    """scores [T, width] and maxima [T, width / 8] on the CPU; POISON where nothing was written."""
    cuda = importlib.import_module("mla_fp4._cuda")
    on = {name: value.cuda() if torch.is_tensor(value) else value for name, value in case.items()}
    q = on["q"].bfloat16() if bf16 else on["q"]
    rows, heads, _ = q.shape
    if width is None:
        width = max(1, int(case["visible"].max())) if candidates is None else candidates.shape[1] * candidate_block
    ids = None if candidates is None else candidates.cuda()
    scores = torch.full((rows, width + 3), POISON, device="cuda")
    tops = torch.full((rows, -(-width // 8) + 1), POISON, device="cuda")
    workspace = torch.full((cuda.index_score_workspace(rows, heads),), 255, dtype=torch.uint8, device="cuda")
    cu = case["cu_seqlens"]
    cuda.index_score(
        q=q.data_ptr(),
        weights=on["head_weights"].data_ptr(),
        q_is_bf16=bf16,
        rows=rows,
        heads=heads,
        pages=on["pages"].data_ptr(),
        blocks=on["pages"].shape[0],
        rows_per_block=case["rows_per_block"],
        block_table=on["block_table"].data_ptr(),
        table_width=on["block_table"].shape[1],
        cu_seqlens=on["cu_seqlens"].data_ptr(),
        batch=len(cu) - 1,
        visible=on["visible"].data_ptr(),
        longest_request=int((cu[1:] - cu[:-1]).max()),
        width=width,
        candidates=0 if ids is None else ids.data_ptr(),
        candidates_width=0 if ids is None else ids.shape[1],
        candidate_block=candidate_block,
        scores=scores.data_ptr(),
        stride=scores.stride(0),
        fill_hidden=fill,
        maxima=tops.data_ptr() if maxima else 0,
        maxima_stride=tops.stride(0),
        workspace=workspace.data_ptr(),
        stream=torch.cuda.current_stream().cuda_stream,
    )
    assert (scores[:, width:] == POISON).all()
    return scores[:, :width].cpu(), tops.cpu()


def keys_of(case, request, count):
    """Packed rows [count, 68] of a request's first keys."""
    size = case["rows_per_block"]
    pages = case["pages"][case["block_table"][request, : -(-count // size)].long()]
    return formats.index_page_rows(pages, size).flatten(0, 1)[:count].contiguous()


def expected(lib, case):
    """The host's scores, POISON where a row does not see a position."""
    cu, visible = case["cu_seqlens"].tolist(), case["visible"]
    out = torch.full((len(visible), max(1, int(visible.max()))), POISON)
    for b, (first, end) in enumerate(itertools.pairwise(cu)):
        count = int(visible[first:end].max()) if end > first else 0
        if not count:
            continue
        rows = keys_of(case, b, count)
        codes, scales = rows[:, :64].contiguous(), rows[:, 64:].contiguous()
        q, weights = case["q"][first:end].contiguous(), case["head_weights"][first:end].contiguous()
        part = torch.empty(end - first, count)
        lib.score_rows(
            address(q), address(weights), end - first, q.shape[1], address(codes), address(scales), count, address(part)
        )
        hidden = torch.arange(count) >= visible[first:end].unsqueeze(1)
        out[first:end, :count] = part.masked_fill(hidden, POISON)
    return out


RAGGED = ([1, 0, 2, 9, 1, 40], [0, 1, 63, *range(120, 129), 1000, *range(500, 540)])


@pytest.mark.parametrize("heads", [1, 4, 8, 20, 32, 64])
@pytest.mark.parametrize("rows_per_block", [16, 64, 128])
def test_equals_the_host_to_the_bit(lib, index_case, heads, rows_per_block):
    """Every key that nobody sees, and every block that nobody uses, holds NaN bytes."""
    case = index_case(*RAGGED, heads=heads, dim=128, rows_per_block=rows_per_block)
    got, _ = index_score(case)
    assert torch.equal(got, expected(lib, case))
    with using("reference"):
        reference = mla_fp4.index_scores(**case)
    seen = reference > -torch.inf
    assert torch.allclose(got[seen], reference[seen], rtol=1e-5, atol=1e-4)


def test_sums_of_a_step_are_exact_on_this_device(lib, index_case):
    """The largest codes everywhere: 1152 a step, next to the smallest ones."""
    case = index_case([2], [256, 256], heads=32, dim=128)
    case["q"] = torch.where(torch.rand(2, 32, 128) < 0.5, 6.0, 0.5) * torch.randn(2, 32, 128).sign()
    case["q"][..., ::32] = 6
    pages = case["pages"][case["block_table"][0, :4].long()]
    pages[:, : 64 * 64] = torch.tensor([0x77, 0x71, 0x17, 0x1F, 0xF9], dtype=torch.uint8)[
        torch.randint(0, 5, (4, 64 * 64))
    ]
    case["pages"][case["block_table"][0, :4].long()] = pages
    assert torch.equal(index_score(case)[0], expected(lib, case))


def test_groups_far_apart_in_one_head(lib, index_case):
    case = index_case([1, 12], [300] * 13, heads=32, dim=128)
    case["q"] *= torch.tensor([1.0, 2.0**-20, 2.0**-13, 2.0**-30]).repeat_interleave(32)
    case["q"][1, :, :32] = 0
    case["q"][2] = 0
    assert torch.equal(index_score(case)[0], expected(lib, case))


def test_bfloat16_queries(lib, index_case):
    case = index_case([2, 20], [100] * 22, heads=32, dim=128)
    case["q"] = case["q"].bfloat16().float()
    assert torch.equal(index_score(case, bf16=True)[0], expected(lib, case))


def test_hidden_positions_become_minus_infinity(index_case):
    case = index_case(*RAGGED, heads=8, dim=128)
    plain, _ = index_score(case)
    filled, _ = index_score(case, fill=True)
    assert torch.equal(filled, torch.where(plain == POISON, -torch.inf, plain))


@pytest.mark.parametrize("heads", [8, 32])
def test_nan_stays_where_it_is(index_case, heads):
    case = index_case([3], [100, 100, 100], heads=heads, dim=128)
    clean, _ = index_score(case)
    case["pages"][case["block_table"][0, 0].long(), 64 * 64 + 7 * 4 + 1] = 255
    case["q"][1, 0, 3] = torch.nan
    got, tops = index_score(case, maxima=True)
    assert got[:, 7].isnan().all() and got[1].isnan().all()
    keep = torch.arange(100) != 7
    assert torch.equal(got[[0, 2]][:, keep], clean[[0, 2]][:, keep])
    assert (tops[1, :13] == -torch.inf).all() and tops[0, 0] == clean[0, :7].max()


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_block_maxima(index_case, heads):
    case = index_case(*RAGGED, heads=heads, dim=128)
    scores, tops = index_score(case, maxima=True)
    for row, visible in enumerate(case["visible"].tolist()):
        for block in range(tops.shape[1]):
            part = scores[row, block * 8 : min(block * 8 + 8, visible)]
            assert tops[row, block] == (part.max() if len(part) else POISON)


@pytest.mark.parametrize("block", [4, 8])
def test_candidates_have_the_scores_of_their_positions(index_case, block):
    case = index_case([1, 3], [900, 1000, 999, 1001], heads=32, dim=128)
    whole, _ = index_score(case)
    candidates = torch.full((4, 160), -1, dtype=torch.int32)
    for row, count in enumerate((0, 1, 120, 77)):
        candidates[row, :count] = torch.randperm(1001 // block + 1)[:count].sort().values.int()
    got, _ = index_score(case, candidates=candidates, candidate_block=block)
    positions = (candidates.long().unsqueeze(-1) * block + torch.arange(block)).flatten(1)
    inside = (candidates >= 0).repeat_interleave(block, dim=1) & (positions < case["visible"].unsqueeze(1))
    gathered = whole.gather(1, positions.clamp(0, whole.shape[1] - 1))
    assert torch.equal(got, torch.where(inside, gathered, POISON))


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_a_row_alone_equals_it_in_a_chunk(index_case, take_rows, heads):
    """Few rows and many rows of a request are two kernels."""
    rows = 40
    case = index_case([rows], [3000 + 7 * i for i in range(rows)], heads=heads, dim=128)
    whole, _ = index_score(case)
    for part in (slice(0, 1), slice(17, 18), slice(31, 36), slice(5, 40)):
        alone, _ = index_score(take_rows(case, part))
        assert torch.equal(alone, whole[part, : alone.shape[1]])
    for _ in range(20):
        assert torch.equal(index_score(case)[0], whole)
    assert torch.equal(index_score(case, width=100_000)[0][:, : whole.shape[1]], whole)


def test_table_entries_outside_of_the_pool_are_not_followed(index_case):
    case = index_case([1], [130], heads=8, dim=128)
    case["block_table"][0, 1] = 2**31 - 1
    assert (index_score(case)[0][0, 64:128] == 0).all()


def test_nothing_visible_and_no_rows(index_case):
    assert (index_score(index_case([2], [0, 0], heads=8, dim=128))[0] == POISON).all()


@pytest.mark.parametrize("change", [{"rows_per_block": 48}, {"rows_per_block": 8}, {"q": torch.zeros(1, 65, 128)}])
def test_wrong_arguments_are_refused(index_case, change):
    with pytest.raises(ValueError):
        index_score(index_case([1], [10], heads=8, dim=128) | change)
